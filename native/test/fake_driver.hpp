// The CUDA driver's virtual memory calls, played by the kernel: pages are pieces of an anonymous file. It keeps the
// driver's rules (a mapping is of whole handles, access is granted apart, only whole mappings are unmapped, a copy needs
// a context, and is over no sooner than its stream is waited for) and refuses on order.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.hpp"

namespace fake {

using namespace harli::cuda;

inline constexpr std::size_t kPage = 4096;
inline constexpr Result kInvalid = 1;

inline std::mutex mutex;
inline int file = -1;
inline AllocationHandle next_handle = 1;
inline std::map<AllocationHandle, off_t> handles;
inline std::map<Address, AllocationHandle> mappings;
inline std::size_t physical_pages = 1 << 20;
inline bool one_unmap_takes_a_run = true;
inline std::size_t changes = 0;  // calls that map, unmap or grant access, since the start
// The n-th next call of a kind fails; below zero: none does.
inline int fail_map = -1, fail_access = -1, fail_unmap = -1, fail_copy = -1, fail_wait = -1;

inline bool due(int& countdown) { return countdown >= 0 && countdown-- == 0; }

inline Result init(unsigned) { return kSuccess; }
inline Result error_name(Result error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
  return kSuccess;
}
inline Result error_string(Result error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : "invalid argument";
  return kSuccess;
}
inline Result device_get(Device* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
inline Result retain(Context* context, Device) {
  *context = &file;
  return kSuccess;
}
inline Result release_context(Device) { return kSuccess; }
inline thread_local int depth = 0;
inline Result push(Context) {
  ++depth;
  return kSuccess;
}
inline Result pop(Context*) {
  --depth;
  return kSuccess;
}
inline Result granularity(std::size_t* bytes, const AllocationProp* prop, int) {
  *bytes = kPage;
  return prop->type == kPinned && prop->location.type == kOnDevice ? kSuccess : kInvalid;
}
inline Result reserve(Address* address, std::size_t bytes, std::size_t, Address, unsigned long long) {
  void* got = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<Address>(got);
  return got == MAP_FAILED ? kOutOfMemory : kSuccess;
}
inline Result free_address(Address address, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto first = mappings.lower_bound(address);
  if (first != mappings.end() && first->first < address + bytes) return kInvalid;
  ::munmap(reinterpret_cast<void*>(address), bytes);
  return kSuccess;
}
inline Result create(AllocationHandle* handle, std::size_t bytes, const AllocationProp*, unsigned long long) {
  const std::lock_guard lock(mutex);
  if (bytes != kPage) return kInvalid;
  if (handles.size() >= physical_pages) return kOutOfMemory;
  if (file < 0) file = ::memfd_create("fake-device", 0);
  *handle = next_handle++;
  const auto place = static_cast<off_t>(*handle * kPage);
  if (::ftruncate(file, place + static_cast<off_t>(kPage)) != 0) return kOutOfMemory;
  handles[*handle] = place;
  return kSuccess;
}
inline Result release(AllocationHandle handle) {
  const std::lock_guard lock(mutex);
  const auto found = handles.find(handle);
  if (found == handles.end()) return kInvalid;
  ::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found->second, kPage);
  handles.erase(found);
  return kSuccess;
}
inline Result map(Address address, std::size_t bytes, std::size_t offset, AllocationHandle handle, unsigned long long) {
  const std::lock_guard lock(mutex);
  ++changes;
  if (due(fail_map)) return kOutOfMemory;
  if (bytes != kPage || offset != 0 || !handles.contains(handle) || mappings.contains(address)) return kInvalid;
  mappings[address] = handle;
  return kSuccess;
}
inline Result unmap(Address address, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  ++changes;
  if (due(fail_unmap)) return kInvalid;
  if (bytes % kPage != 0 || (bytes != kPage && !one_unmap_takes_a_run)) return kInvalid;
  for (std::size_t at = 0; at < bytes; at += kPage) {
    if (!mappings.contains(address + at)) return kInvalid;
  }
  for (std::size_t at = 0; at < bytes; at += kPage) mappings.erase(address + at);
  ::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return kSuccess;
}
inline Result set_access(Address address, std::size_t bytes, const AccessDesc* access, std::size_t count) {
  const std::lock_guard lock(mutex);
  if (due(fail_access)) return kInvalid;
  if (count != 1 || access->flags != kReadWrite) return kInvalid;
  for (std::size_t at = 0; at < bytes; at += kPage) {
    const auto found = mappings.find(address + at);
    if (found == mappings.end()) return kInvalid;
    ::mmap(reinterpret_cast<void*>(address + at), kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
           handles.at(found->second));
  }
  return kSuccess;
}

// What is queued on a stream runs when somebody waits for it: late, as far as anybody may tell.
struct Queue {
  std::vector<std::function<void()>> waiting;
};
inline int streams = 0;
inline Result stream_create(Stream* stream, unsigned flags) {
  const std::lock_guard lock(mutex);
  if (depth == 0 || flags != kNonBlocking) return kInvalid;
  ++streams;
  *stream = new Queue;
  return kSuccess;
}
inline Result stream_destroy(Stream stream) {
  const std::lock_guard lock(mutex);
  if (depth == 0) return kInvalid;
  --streams;
  delete static_cast<Queue*>(stream);
  return kSuccess;
}
inline Result stream_synchronize(Stream stream) {
  const std::lock_guard lock(mutex);
  if (depth == 0) return kInvalid;
  auto waiting = std::exchange(static_cast<Queue*>(stream)->waiting, {});
  if (due(fail_wait)) return kInvalid;
  for (const auto& one : waiting) one();
  return kSuccess;
}
inline Result queue(Stream stream, Address address, std::size_t bytes, std::function<void()> work) {
  const std::lock_guard lock(mutex);
  if (depth == 0 || bytes == 0 || due(fail_copy)) return kInvalid;
  for (std::size_t at = 0; at < bytes; at += kPage) {
    if (!mappings.contains(address + at)) return kInvalid;
  }
  static_cast<Queue*>(stream)->waiting.push_back(std::move(work));
  return kSuccess;
}
inline Result copy_to_host(void* host, Address address, std::size_t bytes, Stream stream) {
  return queue(stream, address, bytes, [=] { std::memcpy(host, reinterpret_cast<const void*>(address), bytes); });
}
inline Result copy_to_device(Address address, const void* host, std::size_t bytes, Stream stream) {
  return queue(stream, address, bytes, [=] { std::memcpy(reinterpret_cast<void*>(address), host, bytes); });
}
inline Result set_bytes(Address address, unsigned char value, std::size_t bytes, Stream stream) {
  return queue(stream, address, bytes, [=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
}

inline const Driver driver{
    init,           error_name,         error_string, device_get,     retain,    release_context,
    push,           pop,                granularity,  reserve,        free_address,
    create,         release,            map,          unmap,          set_access,
    stream_create,  stream_destroy,     stream_synchronize,
    copy_to_host,   copy_to_device,     set_bytes,
};

}  // namespace fake
