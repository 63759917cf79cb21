// Pages by the CUDA driver's virtual memory management.
#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "driver.hpp"

namespace harli::cuda {
namespace {

std::string words(const Driver& driver, const char* call, Result error) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(error, &name);
  driver.cuGetErrorString(error, &text);
  return std::string(call) + ": " + (name ? name : std::to_string(error)) + (text ? std::string(" (") + text + ")" : "");
}

void check(const Driver& driver, const char* call, Result error) {
  if (error == kSuccess) return;
  if (error == kOutOfMemory) throw ArenaFull(words(driver, call, error));
  throw ArenaError(words(driver, call, error));
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const Driver& driver, int ordinal, std::size_t page_bytes) : driver_(driver) {
    check(driver_, "cuInit", driver_.cuInit(0));
    check(driver_, "cuDeviceGet", driver_.cuDeviceGet(&device_, ordinal));
    check(driver_, "cuDevicePrimaryCtxRetain", driver_.cuDevicePrimaryCtxRetain(&context_, device_));
    prop_.type = kPinned;
    prop_.location = {kOnDevice, device_};
    access_ = {{kOnDevice, device_}, kReadWrite};
    try {
      const Current current(*this);
      std::size_t granularity = 0;
      check(driver_, "cuMemGetAllocationGranularity",
            driver_.cuMemGetAllocationGranularity(&granularity, &prop_, kMinimumGranularity));
      page_bytes_ = std::max<std::size_t>(1, (page_bytes + granularity - 1) / granularity) * granularity;
      unmaps_runs_ = try_unmapping_a_run();
      // Neither waits for the default stream nor keeps it waiting.
      check(driver_, "cuStreamCreate", driver_.cuStreamCreate(&copies_, kNonBlocking));
    } catch (...) {
      driver_.cuDevicePrimaryCtxRelease(device_);
      throw;
    }
  }

  ~CudaBackend() override {
    {
      const Quiet current(*this);
      driver_.cuStreamDestroy(copies_);
    }
    driver_.cuDevicePrimaryCtxRelease(device_);
  }

  std::string name() const override { return "cuda"; }
  std::size_t page_bytes() const override { return page_bytes_; }

  std::uintptr_t reserve(std::size_t bytes) override {
    const Current current(*this);
    Address address = 0;
    check(driver_, "cuMemAddressReserve", driver_.cuMemAddressReserve(&address, bytes, page_bytes_, 0, 0));
    return static_cast<std::uintptr_t>(address);
  }

  void free_range(std::uintptr_t address, std::size_t bytes) noexcept override {
    const Quiet current(*this);
    driver_.cuMemAddressFree(address, bytes);
  }

  Handle create() override {
    const Current current(*this);
    AllocationHandle handle = 0;
    check(driver_, "cuMemCreate", driver_.cuMemCreate(&handle, page_bytes_, &prop_, 0));
    return handle;
  }

  void destroy(Handle page) noexcept override {
    const Quiet current(*this);
    driver_.cuMemRelease(page);
  }

  void map(std::uintptr_t address, std::span<const Handle> pages) override {
    const Current current(*this);
    std::size_t done = 0;
    const char* call = "cuMemMap";
    Result result = kSuccess;
    for (; done < pages.size() && result == kSuccess; ++done) {
      result = driver_.cuMemMap(address + done * page_bytes_, page_bytes_, 0, pages[done], 0);
    }
    if (result == kSuccess) {
      // One call for the run. It still takes its time for each page, and longer than mapping it does.
      call = "cuMemSetAccess";
      result = driver_.cuMemSetAccess(address, pages.size() * page_bytes_, &access_, 1);
    } else {
      --done;
    }
    if (result == kSuccess) return;
    for (std::size_t page = 0; page < done; ++page) {
      const Result back = driver_.cuMemUnmap(address + page * page_bytes_, page_bytes_);
      if (back != kSuccess) {
        throw ArenaStuck(words(driver_, call, result) + "; then " + words(driver_, "cuMemUnmap", back));
      }
    }
    check(driver_, call, result);
  }

  void unmap(std::uintptr_t address, std::size_t count) override {
    const Current current(*this);
    const std::size_t step = unmaps_runs_ ? count : 1;
    for (std::size_t page = 0; page < count; page += step) {
      check(driver_, "cuMemUnmap", driver_.cuMemUnmap(address + page * page_bytes_, step * page_bytes_));
    }
  }

  // Would cost a call of the driver for each page, which takes as long as mapping it.
  void forbid(std::uintptr_t, std::size_t) noexcept override {}
  void allow(std::uintptr_t, std::size_t) override {}

  void start_copy_out(void* host, std::uintptr_t address, std::size_t bytes) override {
    const Current current(*this);
    check(driver_, "cuMemcpyDtoHAsync", driver_.cuMemcpyDtoHAsync(host, address, bytes, copies_));
  }

  // Those of other threads too: they share the stream.
  void finish_copies() override {
    const Current current(*this);
    check(driver_, "cuStreamSynchronize", driver_.cuStreamSynchronize(copies_));
  }

  void copy_in(std::uintptr_t address, const void* host, std::size_t bytes) override {
    const Current current(*this);
    check(driver_, "cuMemcpyHtoDAsync", driver_.cuMemcpyHtoDAsync(address, host, bytes, copies_));
    finish_copies();
  }

  void zero(std::uintptr_t address, std::size_t bytes) override {
    const Current current(*this);
    check(driver_, "cuMemsetD8Async", driver_.cuMemsetD8Async(address, 0, bytes, copies_));
    finish_copies();
  }

 private:
  // The device's primary context, which torch uses too, for the calls of this thread.
  class Current {
   public:
    explicit Current(CudaBackend& owner) : driver_(owner.driver_) {
      check(driver_, "cuCtxPushCurrent", driver_.cuCtxPushCurrent(owner.context_));
    }
    ~Current() {
      Context popped = nullptr;
      driver_.cuCtxPopCurrent(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& driver_;
  };

  // The same where nothing can be reported any more.
  class Quiet {
   public:
    explicit Quiet(CudaBackend& owner) noexcept
        : driver_(owner.driver_), pushed_(driver_.cuCtxPushCurrent(owner.context_) == kSuccess) {}
    ~Quiet() {
      Context popped = nullptr;
      if (pushed_) driver_.cuCtxPopCurrent(&popped);
    }
    Quiet(const Quiet&) = delete;
    Quiet& operator=(const Quiet&) = delete;

   private:
    const Driver& driver_;
    const bool pushed_;
  };

  // Whether one call takes several neighbouring pages away; the driver's manual leaves it open, and a call costs tens of
  // microseconds.
  bool try_unmapping_a_run() {
    Address address = 0;
    if (driver_.cuMemAddressReserve(&address, 2 * page_bytes_, page_bytes_, 0, 0) != kSuccess) return false;
    AllocationHandle pages[2];
    std::size_t made = 0;
    while (made < 2 && driver_.cuMemCreate(&pages[made], page_bytes_, &prop_, 0) == kSuccess) ++made;
    std::size_t mapped = 0;
    while (mapped < made && driver_.cuMemMap(address + mapped * page_bytes_, page_bytes_, 0, pages[mapped], 0) == kSuccess)
      ++mapped;
    bool both = mapped == 2 && driver_.cuMemUnmap(address, 2 * page_bytes_) == kSuccess;
    if (both) {
      // Only an address that is really free again takes a page. Whether it did or not, nothing may stay behind it.
      both = driver_.cuMemMap(address + page_bytes_, page_bytes_, 0, pages[1], 0) == kSuccess;
      driver_.cuMemUnmap(address + page_bytes_, page_bytes_);
    } else {
      for (std::size_t page = 0; page < mapped; ++page) driver_.cuMemUnmap(address + page * page_bytes_, page_bytes_);
    }
    for (std::size_t page = 0; page < made; ++page) driver_.cuMemRelease(pages[page]);
    driver_.cuMemAddressFree(address, 2 * page_bytes_);
    return both;
  }

  const Driver& driver_;
  Device device_ = 0;
  Context context_ = nullptr;
  AllocationProp prop_{};
  AccessDesc access_{};
  std::size_t page_bytes_ = 0;
  bool unmaps_runs_ = false;
  Stream copies_ = nullptr;
};

constexpr const char* kLibrary = "libcuda.so.1";

template <typename Function>
void find(void* library, const char* symbol, Function& function) {
  void* found = ::dlsym(library, symbol);
  if (found == nullptr) throw ArenaError(std::string(kLibrary) + " has no " + symbol + ": the driver is too old");
  function = reinterpret_cast<Function>(found);
}

Driver load() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    throw ArenaError(std::string("no CUDA driver: ") + (reason ? reason : kLibrary));
  }
  Driver driver{};
  find(library, "cuInit", driver.cuInit);
  find(library, "cuGetErrorName", driver.cuGetErrorName);
  find(library, "cuGetErrorString", driver.cuGetErrorString);
  find(library, "cuDeviceGet", driver.cuDeviceGet);
  find(library, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain);
  find(library, "cuDevicePrimaryCtxRelease_v2", driver.cuDevicePrimaryCtxRelease);
  find(library, "cuCtxPushCurrent_v2", driver.cuCtxPushCurrent);
  find(library, "cuCtxPopCurrent_v2", driver.cuCtxPopCurrent);
  find(library, "cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity);
  find(library, "cuMemAddressReserve", driver.cuMemAddressReserve);
  find(library, "cuMemAddressFree", driver.cuMemAddressFree);
  find(library, "cuMemCreate", driver.cuMemCreate);
  find(library, "cuMemRelease", driver.cuMemRelease);
  find(library, "cuMemMap", driver.cuMemMap);
  find(library, "cuMemUnmap", driver.cuMemUnmap);
  find(library, "cuMemSetAccess", driver.cuMemSetAccess);
  find(library, "cuStreamCreate", driver.cuStreamCreate);
  find(library, "cuStreamDestroy_v2", driver.cuStreamDestroy);
  find(library, "cuStreamSynchronize", driver.cuStreamSynchronize);
  find(library, "cuMemcpyDtoHAsync_v2", driver.cuMemcpyDtoHAsync);
  find(library, "cuMemcpyHtoDAsync_v2", driver.cuMemcpyHtoDAsync);
  find(library, "cuMemsetD8Async", driver.cuMemsetD8Async);
  return driver;
}

}  // namespace

const Driver& system_driver() {
  static const Driver driver = load();
  return driver;
}

std::unique_ptr<Backend> backend(const Driver& driver, int ordinal, std::size_t page_bytes) {
  return std::make_unique<CudaBackend>(driver, ordinal, page_bytes);
}

}  // namespace harli::cuda
