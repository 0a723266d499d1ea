# Whether CUDA kernels are built, and for which GPUs: CMAKE_CUDA_ARCHITECTURES, else TORCH_CUDA_ARCH_LIST, else the GPU that is
# present, else sm_80 and sm_90, each with its PTX. Newer cards compile the PTX of sm_90 and so have clusters and bulk copies.
# (docs/design/house.md)
option(WARPSMITH_CUDA "build the CUDA kernels when a CUDA compiler is found" ON)
set(warpsmith_default_architectures "80;90")

set(warpsmith_cuda ${WARPSMITH_CUDA})
unset(WARPSMITH_CUDA CACHE)  # a build folder that was once for the CPU alone must not stay so

include(CheckLanguage)
if(warpsmith_cuda)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # an earlier search that found nothing must not hide a compiler that came since
  endif()
  check_language(CUDA)
endif()

if(NOT warpsmith_cuda OR NOT CMAKE_CUDA_COMPILER)
  if("$ENV{WARPSMITH_REQUIRE_CUDA}" STREQUAL "1")
    message(FATAL_ERROR "warpsmith: WARPSMITH_REQUIRE_CUDA=1, but no CUDA compiler was found. Put nvcc on PATH or set CUDACXX.")
  endif()
  if(warpsmith_cuda)
    message(WARNING "warpsmith: no CUDA compiler found (PATH, CUDACXX): building for the CPU only")
  else()
    message(STATUS "warpsmith: WARPSMITH_CUDA=OFF: building for the CPU only")
  endif()
  set(warpsmith_cuda OFF)
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  include(torch_cuda_arch_list)
  torch_cuda_arch_list("$ENV{TORCH_CUDA_ARCH_LIST}" CMAKE_CUDA_ARCHITECTURES)
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE present ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(NOT failed AND present MATCHES "^[0-9]+\\.[0-9]")
    string(REGEX REPLACE "[^0-9\n]" "" present "${present}")
    string(REPLACE "\n" ";" present "${present}")
    list(REMOVE_DUPLICATES present)
    list(TRANSFORM present REPLACE "^90$" "90a")
    list(TRANSFORM present APPEND "-real")
    set(CMAKE_CUDA_ARCHITECTURES ${present})
  else()
    set(CMAKE_CUDA_ARCHITECTURES ${warpsmith_default_architectures})
  endif()
endif()

# An ordinary variable: the next configuration looks at the environment and the GPU again.
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "warpsmith: expected nvcc 12.8 or newer, got ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER})")
endif()
message(STATUS "warpsmith: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
