# Torch's stable ABI without find_package(Torch): headers, one library to link, the target version.
# The environment wins over the cache: a build folder may be used with one torch after another.
if(NOT "$ENV{WARPSMITH_TORCH_DIR}" STREQUAL "")
  set(WARPSMITH_TORCH_DIR "$ENV{WARPSMITH_TORCH_DIR}" CACHE PATH "the torch package to build against" FORCE)
endif()
set(warpsmith_torch_library ${WARPSMITH_TORCH_DIR}/lib/libtorch${CMAKE_SHARED_LIBRARY_SUFFIX})
if(NOT EXISTS ${WARPSMITH_TORCH_DIR}/include/torch/csrc/stable/library.h OR NOT EXISTS ${warpsmith_torch_library})
  message(FATAL_ERROR "warpsmith: WARPSMITH_TORCH_DIR: expected a torch >= 2.11 package, got '${WARPSMITH_TORCH_DIR}'. "
                      "Build through pip, or pass -DWARPSMITH_TORCH_DIR=.../site-packages/torch")
endif()

# The stable headers do not survive -Werror unless they are system headers.
add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE ${WARPSMITH_TORCH_DIR}/include)
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
target_link_libraries(torch_stable INTERFACE ${warpsmith_torch_library})
if(APPLE)
  target_link_options(torch_stable INTERFACE LINKER:-undefined,dynamic_lookup)
else()
  # libtorch alone stays in NEEDED: it brings whichever of CPU and CUDA torch has. Its symbols resolve at load.
  target_link_options(torch_stable INTERFACE LINKER:--no-as-needed,--allow-shlib-undefined,--exclude-libs,ALL)
endif()
