// A heap in one region, for an allocator that asks for blocks of any size: torch's CUDA allocator, through the two C
// functions at the end. A block is whole pages, which are mapped when it is handed out and given back when it is freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "arena.hpp"

namespace harli {

class Heap {
 public:
  // At most `cap` pages at once, in an address range of `pages`: more than the cap ever is, since free addresses
  // fragment.
  Heap(Arena& arena, std::string owner, std::size_t cap, std::size_t pages);

  // An address with `bytes` behind it. Throws ArenaFull when that is over the cap or the arena has no pages.
  std::uintptr_t allocate(std::size_t bytes);
  // Throws ArenaError for an address that `allocate` did not give.
  void free(std::uintptr_t address);

  bool holds(std::uintptr_t address) const;
  std::size_t used() const;        // pages
  std::size_t high_water() const;  // pages
  std::size_t cap() const;
  // What is in use beyond a lower cap stays; nothing more is handed out until it is within.
  void set_cap(std::size_t cap);
  std::string last_refusal() const;

 private:
  const std::shared_ptr<Region> region_;
  mutable std::mutex mutex_;
  std::size_t cap_;
  std::map<std::size_t, std::size_t> blocks_;  // first page → pages
  std::size_t used_ = 0, high_water_ = 0;
  std::string refusal_;
};

// The heap that the C functions allocate from, in this process; null: none, and they refuse. What was allocated is
// freed from the heap that it came from, which lives until then.
void select_heap(std::shared_ptr<Heap> heap);

}  // namespace harli

extern "C" {
// For torch.cuda.memory.CUDAPluggableAllocator. A null pointer says that there is no memory.
__attribute__((visibility("default"))) void* harli_malloc(std::ptrdiff_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void harli_free(void* address, std::ptrdiff_t bytes, int device, void* stream);
}
