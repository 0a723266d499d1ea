# The least compilers and the warnings of our own host code.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "warpsmith: expected g++ 12 or newer (_Float16), got ${CMAKE_CXX_COMPILER_VERSION}; set CXX=g++-12")
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  message(FATAL_ERROR "warpsmith: expected clang 15 or newer (_Float16), got ${CMAKE_CXX_COMPILER_VERSION}")
endif()

set(warpsmith_warnings -Wall -Wextra -Werror)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  list(APPEND warpsmith_warnings -Wno-pass-failed)  # a loop not vectorised for one instruction set is slower, not wrong
endif()

# CPU kernels are plain loops for the vectoriser; contraction and the two flags keep IEEE results for every finite input.
set(warpsmith_cpu_kernel_options -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast)
