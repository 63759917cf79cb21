// The part of the CUDA driver's interface that virtual memory management and copies take (CUDA 10.2 and later).
// Declared here, so that building needs no CUDA: the driver's library is opened where there is one. Values and layouts
// are the driver's binary interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "backend.hpp"

namespace harli::cuda {

using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Address = unsigned long long;
using AllocationHandle = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr int kPinned = 1;             // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kOnDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kReadWrite = 3;          // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kMinimumGranularity = 0; // CU_MEM_ALLOC_GRANULARITY_MINIMUM
inline constexpr unsigned kNonBlocking = 1;   // CU_STREAM_NON_BLOCKING

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProp) == 32);

struct AccessDesc {
  Location location;
  int flags;
};
static_assert(sizeof(AccessDesc) == 12);

// The calls, by the names of the driver.
struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuGetErrorName)(Result error, const char** name);
  Result (*cuGetErrorString)(Result error, const char** text);
  Result (*cuDeviceGet)(Device* device, int ordinal);
  Result (*cuDevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*cuDevicePrimaryCtxRelease)(Device device);
  Result (*cuCtxPushCurrent)(Context context);
  Result (*cuCtxPopCurrent)(Context* context);
  Result (*cuMemGetAllocationGranularity)(std::size_t* bytes, const AllocationProp* prop, int option);
  Result (*cuMemAddressReserve)(Address* address, std::size_t bytes, std::size_t alignment, Address hint,
                                unsigned long long flags);
  Result (*cuMemAddressFree)(Address address, std::size_t bytes);
  Result (*cuMemCreate)(AllocationHandle* handle, std::size_t bytes, const AllocationProp* prop,
                        unsigned long long flags);
  Result (*cuMemRelease)(AllocationHandle handle);
  Result (*cuMemMap)(Address address, std::size_t bytes, std::size_t offset, AllocationHandle handle,
                     unsigned long long flags);
  Result (*cuMemUnmap)(Address address, std::size_t bytes);
  Result (*cuMemSetAccess)(Address address, std::size_t bytes, const AccessDesc* access, std::size_t count);
  Result (*cuStreamCreate)(Stream* stream, unsigned flags);
  Result (*cuStreamDestroy)(Stream stream);
  Result (*cuStreamSynchronize)(Stream stream);
  Result (*cuMemcpyDtoHAsync)(void* host, Address address, std::size_t bytes, Stream stream);
  Result (*cuMemcpyHtoDAsync)(Address address, const void* host, std::size_t bytes, Stream stream);
  Result (*cuMemsetD8Async)(Address address, unsigned char value, std::size_t bytes, Stream stream);
};

// The driver of this machine. Throws ArenaError naming the library and the dynamic linker's words when there is none.
const Driver& system_driver();

// Pages of device `ordinal` through `driver`, which outlives the back end, each of at least `page_bytes`: the next
// multiple of the driver's granularity.
std::unique_ptr<Backend> backend(const Driver& driver, int ordinal, std::size_t page_bytes);

}  // namespace harli::cuda
