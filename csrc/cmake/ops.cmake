# Every family is a folder of kernels/ and files of cpu/, bindings/ and pymodule/ that begin with its name: nothing lists
# them.
file(GLOB warpsmith_op_bindings CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/bindings/*.cpp ${CMAKE_SOURCE_DIR}/csrc/bindings/support/*.cpp)
file(GLOB warpsmith_op_cpu CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/cpu/*.cpp)
file(GLOB_RECURSE warpsmith_op_cuda CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/kernels/*.cu ${CMAKE_SOURCE_DIR}/csrc/device/*.cu)
file(GLOB warpsmith_pymodule CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/pymodule/*.cpp)
# Kernels that use what only sm_90a has (wgmma, setmaxnreg) are in files named *_sm90a.cu.
set(warpsmith_op_cuda_sm90a ${warpsmith_op_cuda})
list(FILTER warpsmith_op_cuda_sm90a INCLUDE REGEX "_sm90a\\.cu$")
list(FILTER warpsmith_op_cuda EXCLUDE REGEX "_sm90a\\.cu$")

function(add_op_library target)
  add_library(${target} SHARED ${warpsmith_op_bindings} ${warpsmith_op_cpu})
  target_include_directories(${target} PRIVATE csrc)
  target_link_libraries(${target} PRIVATE torch_stable)
  set_source_files_properties(${warpsmith_op_cpu} PROPERTIES COMPILE_OPTIONS "${warpsmith_cpu_kernel_options}")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${warpsmith_warnings}>)
  # No run path: torch's library is in the process before this one is loaded, and a stored path would name the build machine.
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
  if(warpsmith_cuda)
    # All for the same architectures, CMAKE_CUDA_ARCHITECTURES: csrc/device/code_probe.cu answers for every kernel.
    target_sources(${target} PRIVATE ${warpsmith_op_cuda})
    target_compile_definitions(${target} PRIVATE WARPSMITH_CUDA)
    add_cublas_lt(${target})
    add_cuda_options(${target})
    if(warpsmith_op_cuda_sm90a AND CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a?(-real|-virtual)?(;|$)")
      add_library(${target}_sm90a OBJECT ${warpsmith_op_cuda_sm90a})
      target_include_directories(${target}_sm90a PRIVATE csrc)
      add_cuda_options(${target}_sm90a)
      set_target_properties(${target}_sm90a PROPERTIES CUDA_ARCHITECTURES 90a-real)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_sm90a>)
      target_compile_definitions(${target} PRIVATE WARPSMITH_SM90A)
    endif()
  endif()
endfunction()

function(add_cuda_options target)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>")
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
endfunction()

function(add_python_module target)
  find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(pybind11 CONFIG REQUIRED)
  pybind11_add_module(${target} ${warpsmith_pymodule})
  target_include_directories(${target} PRIVATE csrc)
  target_compile_options(${target} PRIVATE ${warpsmith_warnings})
  string(REPLACE ";" " " architectures "${CMAKE_CUDA_ARCHITECTURES}")
  target_compile_definitions(${target} PRIVATE
    WARPSMITH_VERSION="${SKBUILD_PROJECT_VERSION}"
    WARPSMITH_HOST_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
    WARPSMITH_CUDA_COMPILER="$<IF:$<BOOL:${warpsmith_cuda}>,${CMAKE_CUDA_COMPILER_VERSION},>"
    WARPSMITH_CUDA_ARCHITECTURES="$<IF:$<BOOL:${warpsmith_cuda}>,${architectures},>")
endfunction()
