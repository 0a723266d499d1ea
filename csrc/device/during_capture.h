#pragma once
#include <cuda_runtime.h>

namespace warpsmith {

// While an object lives, this thread may make calls that a stream capture forbids: the first query of a kernel loads
// its module. (CUDA Runtime API, "cudaThreadExchangeStreamCaptureMode")
class DuringCapture {
 public:
  DuringCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~DuringCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  DuringCapture(const DuringCapture&) = delete;
  DuringCapture& operator=(const DuringCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace warpsmith
