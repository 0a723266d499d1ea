# Whether products with epilogues of cuBLASLt are built, which takes its header: WARPSMITH_CUBLAS_INCLUDE (the environment
# too), else a wheel beside torch, else the CUDA toolkit. Nothing is linked: the library is opened at run time.
if(NOT "$ENV{WARPSMITH_CUBLAS_INCLUDE}" STREQUAL "")
  set(WARPSMITH_CUBLAS_INCLUDE "$ENV{WARPSMITH_CUBLAS_INCLUDE}" CACHE PATH "a folder with cublasLt.h" FORCE)
endif()
set(warpsmith_cublas_include "")
if(warpsmith_cuda)
  foreach(folder IN ITEMS
      "${WARPSMITH_CUBLAS_INCLUDE}"
      "${WARPSMITH_TORCH_DIR}/../nvidia/cu13/include"
      "${WARPSMITH_TORCH_DIR}/../nvidia/cublas/include"
      ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    if(NOT warpsmith_cublas_include AND NOT "${folder}" STREQUAL "" AND EXISTS "${folder}/cublasLt.h")
      set(warpsmith_cublas_include "${folder}")
    endif()
  endforeach()
  if(warpsmith_cublas_include)
    message(STATUS "warpsmith: cublasLt.h in ${warpsmith_cublas_include}")
  elseif("$ENV{WARPSMITH_REQUIRE_CUBLAS_LT}" STREQUAL "1")
    message(FATAL_ERROR "warpsmith: WARPSMITH_REQUIRE_CUBLAS_LT=1, but no cublasLt.h was found. Install nvidia-cublas beside "
                        "torch, or name a folder: WARPSMITH_CUBLAS_INCLUDE (python tools/fetch_headers.py makes one).")
  else()
    message(WARNING "warpsmith: no cublasLt.h beside torch or in the CUDA toolkit: linear layers take torch's products")
  endif()
endif()

function(add_cublas_lt target)
  if(NOT warpsmith_cublas_include)
    return()
  endif()
  set(source csrc/libraries/cublas_lt.cpp)
  target_sources(${target} PRIVATE ${source})
  target_compile_definitions(${target} PRIVATE WARPSMITH_CUBLAS_LT)
  set(headers ${warpsmith_cublas_include} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  list(TRANSFORM headers PREPEND "-isystem;")
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${headers}")
endfunction()
