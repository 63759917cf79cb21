#include "heap.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace harli {

Heap::Heap(Arena& arena, std::string owner, std::size_t cap, std::size_t pages)
    : region_(arena.reserve(std::move(owner), std::max(pages, cap))), cap_(cap) {}

std::uintptr_t Heap::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t page_bytes = region_->page_bytes();
  const std::size_t count = std::max<std::size_t>(1, bytes / page_bytes + (bytes % page_bytes != 0));
  try {
    if (count > cap_ - used_) {
      throw ArenaFull(region_->owner() + " asks for " + std::to_string(count) + " pages more and has " +
                      std::to_string(used_) + " of the " + std::to_string(cap_) + " it may have");
    }
    // First fit: blocks are few and large, since torch asks for whole segments.
    std::size_t first = 0;
    for (const auto& [start, length] : blocks_) {
      if (start - first >= count) break;
      first = start + length;
    }
    if (count > region_->pages() - first) {
      throw ArenaFull(region_->owner() + " has no " + std::to_string(count) + " neighbouring addresses left");
    }
    region_->map(first, count);
    blocks_.emplace(first, count);
    used_ += count;
    high_water_ = std::max(high_water_, used_);
    return region_->address() + first * page_bytes;
  } catch (const ArenaError& error) {
    refusal_ = error.what();
    throw;
  }
}

void Heap::free(std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  const std::size_t offset = address - region_->address();
  const auto block = offset % region_->page_bytes() == 0 ? blocks_.find(offset / region_->page_bytes()) : blocks_.end();
  if (address < region_->address() || block == blocks_.end()) {
    throw ArenaError(region_->owner() + ": no block begins at this address");
  }
  const auto [first, count] = *block;
  blocks_.erase(block);
  used_ -= count;
  region_->unmap(first, count);
}

bool Heap::holds(std::uintptr_t address) const {
  return address >= region_->address() && address - region_->address() < region_->pages() * region_->page_bytes();
}

std::size_t Heap::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::size_t Heap::high_water() const {
  const std::lock_guard lock(mutex_);
  return high_water_;
}

std::string Heap::last_refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

namespace {

std::mutex selection_mutex;
std::shared_ptr<Heap> selected;
// Heaps that blocks were handed out from; those without blocks are dropped at the next look.
std::vector<std::shared_ptr<Heap>> in_use;

}  // namespace

void select_heap(std::shared_ptr<Heap> heap) {
  const std::lock_guard lock(selection_mutex);
  selected = std::move(heap);
  std::erase_if(in_use, [](const auto& one) { return one != selected && one->used() == 0; });
  if (selected && std::find(in_use.begin(), in_use.end(), selected) == in_use.end()) in_use.push_back(selected);
}

}  // namespace harli

extern "C" void* harli_malloc(std::ptrdiff_t bytes, int /*device*/, void* /*stream*/) {
  std::shared_ptr<harli::Heap> heap;
  {
    const std::lock_guard lock(harli::selection_mutex);
    heap = harli::selected;
  }
  if (!heap || bytes < 0) return nullptr;
  try {
    return reinterpret_cast<void*>(heap->allocate(static_cast<std::size_t>(bytes)));
  } catch (const std::exception&) {
    return nullptr;  // torch raises OutOfMemoryError; the heap keeps the reason
  }
}

extern "C" void harli_free(void* address, std::ptrdiff_t /*bytes*/, int /*device*/, void* /*stream*/) {
  const auto place = reinterpret_cast<std::uintptr_t>(address);
  std::shared_ptr<harli::Heap> heap;
  {
    const std::lock_guard lock(harli::selection_mutex);
    for (const auto& one : harli::in_use) {
      if (one->holds(place)) heap = one;
    }
  }
  try {
    if (heap) heap->free(place);
  } catch (const std::exception&) {
    // The block's pages are lost and counted as such; nothing can be thrown through torch's C interface.
  }
  heap.reset();
  const std::lock_guard lock(harli::selection_mutex);
  std::erase_if(harli::in_use, [](const auto& one) { return one != harli::selected && one->used() == 0; });
}
