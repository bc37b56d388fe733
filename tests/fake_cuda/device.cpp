// A CUDA device for a torch without CUDA: autograd asks it for streams, and it has one on which nothing runs.
// Fake tensors (shapes, no memory) need no more. Preload it: torch looks for the hooks once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType type_ = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return type_; }
  c10::Device exchangeDevice(c10::Device) const override { return {type_, 0}; }
  c10::Device getDevice() const override { return {type_, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(type_, 0)); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(type_, 0)); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(type_, 0)); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
} // namespace
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
