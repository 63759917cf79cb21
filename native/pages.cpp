#include "pages.hpp"

#include <algorithm>
#include <utility>

namespace harli::detail {
namespace {

// Calls `of(first, count)` for each run of places that hold `value`.
template <typename Of>
void for_each_run(const std::vector<bool>& places, bool value, Of of) {
  for (std::size_t first = 0; first < places.size();) {
    std::size_t end = first;
    while (end < places.size() && places[end] == value) ++end;
    if (end > first) of(first, end - first);
    first = end + 1;
  }
}

}  // namespace

Pages::Pages(Backend& backend, std::size_t capacity) : backend_(backend), page_bytes_(backend.page_bytes()) {
  kept_.reserve(capacity);  // so that giving back never allocates
}

Pages::~Pages() { keep_at_most(0); }

void Pages::put(std::uintptr_t address, std::span<Handle> pages) {
  std::vector<bool> has(pages.size(), false);
  std::size_t found = 0;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      has[i] = take_in_place(address + i * page_bytes_, pages[i]);
      found += has[i];
    }
  }
  try {
    for_each_run(has, true, [&](std::size_t first, std::size_t count) {
      backend_.allow(address + first * page_bytes_, count);
    });
    if (found < pages.size()) {
      const std::lock_guard driver(driver_);
      fill(address, pages, has);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    for_each_run(has, true, [&](std::size_t first, std::size_t count) {
      backend_.forbid(address + first * page_bytes_, count);
      for (const Handle page : pages.subspan(first, count)) keep(page);
    });
    throw;
  }
  in_place_ += found;
}

void Pages::fill(std::uintptr_t address, std::span<Handle> pages, std::vector<bool>& has) {
  const std::vector<bool> there = has;
  std::vector<bool> others(pages.size(), false);  // behind which there is somebody else's page
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (has[i]) continue;
      others[i] = behind_.contains(address + i * page_bytes_);
      if (kept_.empty()) continue;
      pages[i] = kept_.back();
      take(pages[i]);
      has[i] = true;
    }
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (has[i]) continue;
    pages[i] = backend_.create();
    ++created_;
    const std::lock_guard lock(mutex_);
    pages_.try_emplace(pages[i]);
    has[i] = true;
  }
  for_each_run(others, true,
               [&](std::size_t first, std::size_t count) { take_away(address + first * page_bytes_, count); });
  for_each_run(there, false, [&](std::size_t first, std::size_t count) {
    try {
      put_run(address + first * page_bytes_, pages.subspan(first, count));
    } catch (const ArenaStuck&) {
      lost_ += count;
      for (std::size_t i = first; i < first + count; ++i) has[i] = false;
      throw;
    }
  });
}

void Pages::put_run(std::uintptr_t address, std::span<const Handle> pages) {
  backend_.map(address, pages);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    behind_[address + i * page_bytes_] = pages[i];
    pages_.at(pages[i]).addresses.push_back(address + i * page_bytes_);
  }
}

void Pages::take_away(std::uintptr_t address, std::size_t count) {
  backend_.unmap(address, count);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < count; ++i) {
    const auto found = behind_.find(address + i * page_bytes_);
    std::erase(pages_.at(found->second).addresses, found->first);
    behind_.erase(found);
  }
}

void Pages::give_back(std::uintptr_t address, std::span<const Handle> pages) noexcept {
  backend_.forbid(address, pages.size());
  const std::lock_guard lock(mutex_);
  for (const Handle page : pages) keep(page);
}

bool Pages::clear(std::uintptr_t address, std::size_t count) noexcept {
  const std::lock_guard driver(driver_);
  std::vector<bool> filled(count, false);
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) filled[i] = behind_.contains(address + i * page_bytes_);
  }
  bool cleared = true;
  for_each_run(filled, true, [&](std::size_t first, std::size_t run) {
    try {
      take_away(address + first * page_bytes_, run);
    } catch (const std::exception&) {
      cleared = false;
    }
  });
  return cleared;
}

std::size_t Pages::keep_at_most(std::size_t most) noexcept {
  const std::lock_guard driver(driver_);
  std::size_t went = 0;
  while (destroy_one(most)) ++went;
  return went;
}

bool Pages::destroy_one(std::size_t most) noexcept {
  Handle page;
  std::vector<std::uintptr_t> addresses;
  {
    const std::lock_guard lock(mutex_);
    if (kept_.size() <= most) return false;
    page = kept_.back();
    take(page);
    addresses = std::move(pages_.at(page).addresses);
  }
  for (const std::uintptr_t address : addresses) {
    try {
      backend_.unmap(address, 1);
    } catch (const std::exception&) {
      ++lost_;  // whoever is given its handle next would seem to have it there
      return true;
    }
    const std::lock_guard lock(mutex_);
    behind_.erase(address);
  }
  {
    const std::lock_guard lock(mutex_);
    pages_.erase(page);
  }
  backend_.destroy(page);
  return true;
}

bool Pages::take_in_place(std::uintptr_t address, Handle& page) {
  const auto found = behind_.find(address);
  if (found == behind_.end() || pages_.at(found->second).kept_at == kInUse) return false;
  page = found->second;
  take(page);
  return true;
}

void Pages::take(Handle page) {
  const std::size_t place = std::exchange(pages_.at(page).kept_at, kInUse);
  const Handle last = kept_.back();
  kept_[place] = last;
  if (last != page) pages_.at(last).kept_at = place;
  kept_.pop_back();
}

void Pages::keep(Handle page) noexcept {
  pages_.find(page)->second.kept_at = kept_.size();
  kept_.push_back(page);
}

std::size_t Pages::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_.size();
}

}  // namespace harli::detail
