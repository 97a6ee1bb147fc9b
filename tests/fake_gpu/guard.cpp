// A CUDA device without hardware, to run autograd over fake tensors of device "cuda": PyTorch's wheel for CPUs lacks one, and
// the one of a wheel for GPUs is replaced.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {type(), current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    if (device.index() >= 0) current = device.index();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }

  // One stream, on which everything has ended.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {type(), device.index() < 0 ? current : device.index()});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());

}  // namespace

// A wheel for GPUs registers its own guard as torch is imported.
extern "C" void replace_guard() { c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, new Guard()); }

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return 8; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return current; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return current; }
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);

}  // namespace at
