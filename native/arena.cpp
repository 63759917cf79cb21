#include "arena.hpp"

#include <algorithm>
#include <utility>

namespace harli {
namespace detail {

Pool::Pool(std::unique_ptr<Backend> backend, std::size_t capacity)
    : backend_(std::move(backend)), page_bytes_(backend_->page_bytes()), capacity_(capacity), pages_(*backend_, capacity) {}

void Pool::join(const std::string& owner) {
  const std::lock_guard lock(mutex_);
  ++owners_[owner].holders;
}

void Pool::leave(const std::string& owner) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = owners_.find(owner);
  if (found != owners_.end() && --found->second.holders == 0) owners_.erase(found);
}

void Pool::charge(const std::string& owner, std::size_t count) {
  const std::lock_guard lock(mutex_);
  const std::size_t room = capacity_ - used_ - pages_.lost();
  if (count > room) {
    throw ArenaFull(owner + " asks for " + std::to_string(count) + " pages of " + std::to_string(page_bytes_) +
                    " bytes; " + std::to_string(room) + " of " + std::to_string(capacity_) + " are free");
  }
  Use& use = owners_.at(owner);
  use.pages += count;
  use.high_water = std::max(use.high_water, use.pages);
  used_ += count;
  high_water_ = std::max(high_water_, used_);
}

void Pool::discharge(const std::string& owner, std::size_t count) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = owners_.find(owner);
  if (found == owners_.end()) return;
  found->second.pages -= count;
  used_ -= count;
}

void Pool::put(const std::string& owner, std::uintptr_t address, std::span<Handle> pages) {
  charge(owner, pages.size());
  try {
    pages_.put(address, pages);
  } catch (...) {
    discharge(owner, pages.size());
    throw;
  }
  mapped_ += pages.size();
}

void Pool::give_back(const std::string& owner, std::uintptr_t address, std::span<const Handle> pages) noexcept {
  pages_.give_back(address, pages);
  discharge(owner, pages.size());
  unmapped_ += pages.size();
}

void Pool::shed() noexcept {
  std::size_t most = 0;
  {
    const std::lock_guard lock(mutex_);
    most = capacity_ - used_ - std::min(pages_.lost(), capacity_ - used_);
  }
  pages_.keep_at_most(most);
}

Statistics Pool::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics said{page_bytes_, capacity_, used_,     high_water_,       pages_.kept(),      pages_.lost(),
                  mapped_,     unmapped_, pages_.created(), pages_.in_place(), {}};
  said.owners.reserve(owners_.size());
  for (const auto& [name, use] : owners_) said.owners.push_back({name, use.pages, use.high_water});
  return said;
}

}  // namespace detail

// ---- region ---------------------------------------------------------------------------------------------------------

Region::Region(std::shared_ptr<detail::Pool> pool, std::string owner, std::size_t pages)
    : pool_(std::move(pool)),
      owner_(std::move(owner)),
      pages_(pages),
      handles_(pages),
      is_mapped_(pages, false),
      is_copied_(pages, false) {
  if (pages == 0) throw ArenaError("a region of no pages for " + owner_);
  pool_->join(owner_);
  try {
    address_ = pool_->backend().reserve(pages * pool_->page_bytes());
  } catch (...) {
    pool_->leave(owner_);
    throw;
  }
}

Region::~Region() {
  for (std::size_t first = 0; first < pages_;) {
    std::size_t end = first;
    while (end < pages_ && is_mapped_[end]) ++end;
    if (end > first) unmap_locked(first, end - first);
    first = end + 1;
  }
  // A range that the driver still holds pages in is left to the end of the process.
  if (pool_->clear(address_, pages_) && clean_) pool_->backend().free_range(address_, pages_ * page_bytes());
  pool_->leave(owner_);
}

bool Region::is_mapped(std::size_t first, std::size_t count) const {
  const std::lock_guard lock(mutex_);
  check_range("look at", first, count);
  return std::all_of(is_mapped_.begin() + static_cast<std::ptrdiff_t>(first),
                     is_mapped_.begin() + static_cast<std::ptrdiff_t>(first + count), [](bool one) { return one; });
}

void Region::check_range(const char* what, std::size_t first, std::size_t count) const {
  if (first > pages_ || count > pages_ - first) {
    throw ArenaError(owner_ + ": cannot " + what + " pages " + std::to_string(first) + " to " +
                     std::to_string(first + count) + " of a region of " + std::to_string(pages_));
  }
}

void Region::check_mapped(const char* what, std::size_t first, std::size_t count) const {
  check_range(what, first, count);
  for (std::size_t page = first; page < first + count; ++page) {
    if (!is_mapped_[page]) throw ArenaError(owner_ + ": page " + std::to_string(page) + " is not mapped");
    if (is_copied_[page]) throw ArenaError(owner_ + ": page " + std::to_string(page) + " is being copied");
  }
}

void Region::map(std::size_t first, std::size_t count) {
  const std::lock_guard lock(mutex_);
  map_locked(first, count);
}

void Region::map_locked(std::size_t first, std::size_t count) {
  check_range("map", first, count);
  if (count == 0) return;
  for (std::size_t page = first; page < first + count; ++page) {
    if (is_mapped_[page]) throw ArenaError(owner_ + ": page " + std::to_string(page) + " is mapped already");
  }
  try {
    pool_->put(owner_, address_ + first * page_bytes(), {handles_.data() + first, count});
  } catch (const ArenaStuck&) {
    clean_ = false;
    throw;
  }
  std::fill_n(is_mapped_.begin() + static_cast<std::ptrdiff_t>(first), count, true);
  mapped_ += count;
}

void Region::unmap(std::size_t first, std::size_t count) {
  const std::lock_guard lock(mutex_);
  check_mapped("unmap", first, count);
  if (count > 0) unmap_locked(first, count);
}

void Region::unmap_locked(std::size_t first, std::size_t count) noexcept {
  std::fill_n(is_mapped_.begin() + static_cast<std::ptrdiff_t>(first), count, false);
  mapped_ -= count;
  pool_->give_back(owner_, address_ + first * page_bytes(), {handles_.data() + first, count});
}

void Region::mark_copied(std::size_t first, std::size_t count, bool copied) {
  std::fill_n(is_copied_.begin() + static_cast<std::ptrdiff_t>(first), count, copied);
}

void Region::move_out(std::span<const Window> windows) {
  std::size_t begun = 0;
  try {
    for (const auto& [first, count, host] : windows) {
      {
        const std::lock_guard lock(mutex_);
        check_mapped("move out", first, count);
        mark_copied(first, count, true);
      }
      ++begun;
      if (count > 0) pool_->backend().start_copy_out(host, address_ + first * page_bytes(), count * page_bytes());
    }
    pool_->backend().finish_copies();
  } catch (...) {
    if (begun > 0) finish_what_began();
    const std::lock_guard lock(mutex_);
    for (const auto& [first, count, host] : windows.first(begun)) mark_copied(first, count, false);
    throw;
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [first, count, host] : windows) {
    mark_copied(first, count, false);
    unmap_locked(first, count);
  }
}

void Region::finish_what_began() noexcept {
  try {
    pool_->backend().finish_copies();
  } catch (const std::exception&) {
    // so has the context, and nothing copies any more
  }
}

void Region::move_in(std::span<const Window> windows) {
  for (const auto& [first, count, host] : windows) {
    {
      const std::lock_guard lock(mutex_);
      map_locked(first, count);
      mark_copied(first, count, true);
    }
    if (count == 0) continue;
    const std::uintptr_t address = address_ + first * page_bytes();
    try {
      if (host == nullptr) {
        pool_->backend().zero(address, count * page_bytes());
      } else {
        pool_->backend().copy_in(address, host, count * page_bytes());
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      mark_copied(first, count, false);
      unmap_locked(first, count);
      throw;
    }
    const std::lock_guard lock(mutex_);
    mark_copied(first, count, false);
  }
}

void map_all(const std::vector<std::shared_ptr<Region>>& regions, const std::vector<std::size_t>& firsts,
             const std::vector<std::size_t>& counts) {
  std::size_t done = 0;
  try {
    for (; done < regions.size(); ++done) regions[done]->map(firsts.at(done), counts.at(done));
  } catch (...) {
    while (done-- > 0) regions[done]->unmap(firsts[done], counts[done]);
    throw;
  }
}

void unmap_all(const std::vector<std::shared_ptr<Region>>& regions, const std::vector<std::size_t>& firsts,
               const std::vector<std::size_t>& counts) {
  for (std::size_t i = 0; i < regions.size(); ++i) regions[i]->unmap(firsts.at(i), counts.at(i));
}

// ---- claim ----------------------------------------------------------------------------------------------------------

Claim::Claim(std::shared_ptr<detail::Pool> pool, std::string owner, std::size_t pages)
    : pool_(std::move(pool)), owner_(std::move(owner)) {
  pool_->join(owner_);
  try {
    pool_->charge(owner_, pages);
  } catch (...) {
    pool_->leave(owner_);
    throw;
  }
  pages_ = pages;
  pool_->shed();
}

Claim::~Claim() {
  pool_->discharge(owner_, pages_);
  pool_->leave(owner_);
}

std::size_t Claim::pages() const {
  const std::lock_guard lock(mutex_);
  return pages_;
}

void Claim::resize(std::size_t pages) {
  const std::lock_guard lock(mutex_);
  if (pages > pages_) {
    pool_->charge(owner_, pages - pages_);
    pool_->shed();
  } else {
    pool_->discharge(owner_, pages_ - pages);
  }
  pages_ = pages;
}

}  // namespace harli
