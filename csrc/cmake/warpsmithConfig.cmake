# find_package(warpsmith) for LibTorch programs. Gives the target warpsmith::warpsmith: the autograd-aware functions of
# <warpsmith/*.h> (header-only, over your own LibTorch) and the op library, linked so that its ops register at start.
#
# Torch is the one that CMake finds (Torch_DIR, CMAKE_PREFIX_PATH), else the one beside this package in site-packages.
include(CMakeFindDependencyMacro)
get_filename_component(warpsmith_dir "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
find_package(Torch 2.11 QUIET CONFIG)
if(NOT Torch_FOUND)
  find_dependency(Torch 2.11 CONFIG PATHS "${warpsmith_dir}/../torch/share/cmake")
endif()

set(warpsmith_OPS_LIBRARY "${warpsmith_dir}/libwarpsmith_ops${CMAKE_SHARED_LIBRARY_SUFFIX}")
foreach(part "${warpsmith_OPS_LIBRARY}" "${warpsmith_dir}/include/warpsmith/op.h")
  if(NOT EXISTS "${part}")
    set(warpsmith_FOUND FALSE)
    set(warpsmith_NOT_FOUND_MESSAGE "${part} is missing; install the package again")
    return()
  endif()
endforeach()

if(NOT TARGET warpsmith::warpsmith)
  # The program calls the ops through the dispatcher, never by symbol: with --as-needed, the default of many compilers, the
  # linker would drop the library.
  add_library(warpsmith::ops SHARED IMPORTED)
  set_target_properties(warpsmith::ops PROPERTIES IMPORTED_LOCATION "${warpsmith_OPS_LIBRARY}")
  add_library(warpsmith::warpsmith INTERFACE IMPORTED)
  set_target_properties(warpsmith::warpsmith PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${warpsmith_dir}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
  if(APPLE)
    target_link_libraries(warpsmith::warpsmith INTERFACE warpsmith::ops)
  else()
    target_link_libraries(warpsmith::warpsmith INTERFACE
      -Wl,--push-state,--no-as-needed warpsmith::ops -Wl,--pop-state)
  endif()
  target_link_libraries(warpsmith::warpsmith INTERFACE ${TORCH_LIBRARIES})
endif()
