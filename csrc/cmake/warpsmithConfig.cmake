# find_package(warpsmith) for LibTorch programs. Gives the target warpsmith::warpsmith: the autograd-aware functions of
# <warpsmith/*.h> (header-only, over your own LibTorch) and the op library, linked so that its ops register at start.
include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(warpsmith_dir "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(warpsmith_OPS_LIBRARY "${warpsmith_dir}/libwarpsmith_ops${CMAKE_SHARED_LIBRARY_SUFFIX}")
if(NOT EXISTS "${warpsmith_OPS_LIBRARY}")
  # An editable install keeps headers in the source tree and the library in site-packages.
  set(warpsmith_FOUND FALSE)
  set(warpsmith_NOT_FOUND_MESSAGE "libwarpsmith_ops is missing beside ${CMAKE_CURRENT_LIST_DIR}; install the package again")
  return()
endif()

if(NOT TARGET warpsmith::warpsmith)
  add_library(warpsmith::warpsmith INTERFACE IMPORTED)
  set_target_properties(warpsmith::warpsmith PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${warpsmith_dir}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
  target_link_libraries(warpsmith::warpsmith INTERFACE ${TORCH_LIBRARIES})
  # The program calls the ops through the dispatcher, never by symbol: without --no-as-needed the linker would drop the library.
  target_link_options(warpsmith::warpsmith INTERFACE "LINKER:--push-state,--no-as-needed,${warpsmith_OPS_LIBRARY},--pop-state")
  target_link_options(warpsmith::warpsmith INTERFACE "LINKER:-rpath,${warpsmith_dir}")
endif()
