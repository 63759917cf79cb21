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
    if (count > cap_ - std::min(cap_, used_)) {
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
    const auto block = blocks_.emplace(first, count).first;  // before the pages: a map may have no memory for it
    try {
      region_->map(first, count);
    } catch (...) {
      blocks_.erase(block);
      throw;
    }
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

std::size_t Heap::cap() const {
  const std::lock_guard lock(mutex_);
  return cap_;
}

void Heap::set_cap(std::size_t cap) {
  const std::lock_guard lock(mutex_);
  cap_ = cap;
}

std::string Heap::last_refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

namespace {

struct Selection {
  std::mutex mutex;
  std::shared_ptr<Heap> selected;
  // Heaps that blocks were handed out from; those without blocks are dropped at the next look.
  std::vector<std::shared_ptr<Heap>> in_use;
};

// Never destroyed: torch may free blocks while the process ends, after this file's statics would be gone.
Selection& selection() {
  static Selection& made = *new Selection;
  return made;
}

// Takes the heaps out that hold nothing, for the caller to let go of without the lock: what goes with the last of them
// is a chain of driver calls.
std::vector<std::shared_ptr<Heap>> take_idle(Selection& s) {
  std::vector<std::shared_ptr<Heap>> idle;
  std::erase_if(s.in_use, [&](const auto& one) {
    if (one == s.selected || one->used() != 0) return false;
    idle.push_back(one);
    return true;
  });
  return idle;
}

}  // namespace

void select_heap(std::shared_ptr<Heap> heap) {
  Selection& s = selection();
  std::vector<std::shared_ptr<Heap>> idle;
  const std::lock_guard lock(s.mutex);
  s.selected.swap(heap);  // the one before is let go of, if need be, with the argument: after the lock
  idle = take_idle(s);
}

}  // namespace harli

extern "C" void* harli_malloc(std::ptrdiff_t bytes, int /*device*/, void* /*stream*/) {
  harli::Selection& s = harli::selection();
  std::shared_ptr<harli::Heap> heap;
  {
    const std::lock_guard lock(s.mutex);
    heap = s.selected;
  }
  if (!heap || bytes < 0) return nullptr;
  try {
    const std::uintptr_t block = heap->allocate(static_cast<std::size_t>(bytes));
    try {
      // Another heap may have been selected meanwhile: from now on this one is known as long as it holds the block.
      const std::lock_guard lock(s.mutex);
      if (std::find(s.in_use.begin(), s.in_use.end(), heap) == s.in_use.end()) s.in_use.push_back(heap);
    } catch (...) {
      heap->free(block);
      throw;
    }
    return reinterpret_cast<void*>(block);
  } catch (const std::exception&) {
    return nullptr;  // torch raises OutOfMemoryError; the heap keeps the reason
  }
}

extern "C" void harli_free(void* address, std::ptrdiff_t /*bytes*/, int /*device*/, void* /*stream*/) {
  const auto place = reinterpret_cast<std::uintptr_t>(address);
  harli::Selection& s = harli::selection();
  std::shared_ptr<harli::Heap> heap;
  {
    const std::lock_guard lock(s.mutex);
    for (const auto& one : s.in_use) {
      if (one->holds(place)) heap = one;
    }
  }
  try {
    if (heap) heap->free(place);
    std::vector<std::shared_ptr<harli::Heap>> idle;
    const std::lock_guard lock(s.mutex);
    idle = harli::take_idle(s);
  } catch (const std::exception&) {
    // The block's pages are lost and counted as such; nothing can be thrown through torch's C interface.
  }
}
