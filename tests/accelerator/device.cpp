// A CUDA device that computes nothing. torch's CPU build asks it for streams, events and the current device when fake
// tensors on "cuda" run a backward pass; every answer is the one stream of the one device.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake_device {

const c10::Device the_device(c10::DeviceType::CUDA, 0);

c10::Stream the_stream() {
  return c10::Stream(c10::Stream::DEFAULT, the_device);
}

// The base class changes nothing, and refuses whatever has to do with streams: only that is answered here.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return the_device; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }

  c10::Stream getStream(c10::Device) const noexcept override { return the_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return the_stream(); }

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// torch finds it by its name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace fake_device

namespace at {
using ::fake_device::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
