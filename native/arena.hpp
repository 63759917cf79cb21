// One pool of physical pages and the address ranges that it is mapped into.
//
// A region's addresses are reserved at their maximum size once; pages come and go behind them, so whatever holds an
// address (a tensor, a captured graph) stays valid. Every page in use belongs to an owner, by name. Pages that are given
// back are kept for the next one who asks, and stay where they are until then (pages.hpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pages.hpp"

namespace harli {

struct OwnerUse {
  std::string name;
  std::size_t pages;       // mapped or claimed now
  std::size_t high_water;  // the most there ever were
};

struct Statistics {
  std::size_t page_bytes;
  std::size_t capacity;    // pages, in all
  std::size_t used;        // mapped or claimed
  std::size_t high_water;  // the most ever used
  std::size_t kept;        // free, and ready to be mapped without being made
  std::size_t lost;        // pages that the driver did not give back
  std::uint64_t mapped;    // pages mapped since the start
  std::uint64_t unmapped;
  std::uint64_t created;   // of `mapped`, those that had to be made; the others were kept ones
  std::uint64_t in_place;  // of `mapped`, those that were still behind their addresses
  std::vector<OwnerUse> owners;
};

namespace detail {

// What arena, regions and claims share: it lives as long as the last of them, so they can be destroyed in any order.
class Pool {
 public:
  Pool(std::unique_ptr<Backend> backend, std::size_t capacity);

  Backend& backend() const { return *backend_; }
  std::size_t page_bytes() const { return page_bytes_; }

  // A region or claim of `owner` begins, or ends: an owner is known as long as it has one.
  void join(const std::string& owner);
  void leave(const std::string& owner) noexcept;

  // Counts `count` pages to `owner`, or throws ArenaFull with nothing counted.
  void charge(const std::string& owner, std::size_t count);
  void discharge(const std::string& owner, std::size_t count) noexcept;

  // Counts `pages.size()` pages to `owner` and puts them behind the addresses from `address` on: see Pages::put. What
  // throws leaves none counted.
  void put(const std::string& owner, std::uintptr_t address, std::span<Handle> pages);
  void give_back(const std::string& owner, std::uintptr_t address, std::span<const Handle> pages) noexcept;
  bool clear(std::uintptr_t address, std::size_t count) noexcept { return pages_.clear(address, count); }

  std::size_t trim() noexcept { return pages_.keep_at_most(0); }
  // Destroys kept pages until they and the used ones are within the capacity again: what is claimed lies elsewhere.
  void shed() noexcept;
  Statistics statistics() const;

 private:
  struct Use {
    std::size_t pages = 0;
    std::size_t high_water = 0;
    std::size_t holders = 0;  // regions and claims
  };

  const std::unique_ptr<Backend> backend_;
  const std::size_t page_bytes_;
  const std::size_t capacity_;
  Pages pages_;
  std::atomic<std::uint64_t> mapped_{0}, unmapped_{0};
  // Guards what follows, and is never held across a call of the back end: figures are read beside a long mapping.
  mutable std::mutex mutex_;
  std::size_t used_ = 0, high_water_ = 0;
  std::map<std::string, Use> owners_;
};

}  // namespace detail

// Pages [first, first + count) of a region, and as many bytes of the host's memory that their content goes to or comes
// from; null, where it comes from: zeros.
struct Window {
  std::size_t first, count;
  void* host;
};

// A range of addresses with room for `pages()` pages. Destroying it unmaps what is mapped.
class Region {
 public:
  Region(std::shared_ptr<detail::Pool> pool, std::string owner, std::size_t pages);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::uintptr_t address() const { return address_; }
  std::size_t pages() const { return pages_; }
  std::size_t page_bytes() const { return pool_->page_bytes(); }
  const std::string& owner() const { return owner_; }
  std::size_t mapped() const { return mapped_; }
  bool is_mapped(std::size_t first, std::size_t count) const;

  // Puts pages behind [first, first + count). All or nothing: throws ArenaFull when there are not so many, ArenaError
  // when one is mapped already, when the range leaves the region, or with the driver's words.
  void map(std::size_t first, std::size_t count);
  // Gives the pages behind [first, first + count) back; on a GPU without a call of the driver. Throws ArenaError, with
  // nothing changed, when one is not mapped. Nothing may use the addresses any more: the work that does has ended.
  void unmap(std::size_t first, std::size_t count);

  // Copies the content of all windows and gives their pages back. Throws, with nothing changed, as `unmap` or a copy does.
  void move_out(std::span<const Window> windows);
  // Puts pages behind each window, in order, and the content into them. What throws, as `map` or a copy does, leaves
  // those before it inside, and it and those behind it unmapped.
  void move_in(std::span<const Window> windows);

 private:
  void check_range(const char* what, std::size_t first, std::size_t count) const;
  void check_mapped(const char* what, std::size_t first, std::size_t count) const;
  void map_locked(std::size_t first, std::size_t count);
  void unmap_locked(std::size_t first, std::size_t count) noexcept;
  void mark_copied(std::size_t first, std::size_t count, bool copied);
  void finish_what_began() noexcept;

  const std::shared_ptr<detail::Pool> pool_;
  const std::string owner_;
  const std::size_t pages_;
  std::uintptr_t address_ = 0;
  mutable std::mutex mutex_;
  std::vector<Handle> handles_;
  std::vector<bool> is_mapped_;
  std::vector<bool> is_copied_;  // now: nobody may unmap it. Copies run without the mutex
  std::atomic<std::size_t> mapped_{0};  // is read beside a long mapping
  bool clean_ = true;  // the driver holds no page in the range but those that the pool knows of
};

// Region::map for several at once: all of them or none. counts[i] pages of regions[i] from firsts[i] on.
void map_all(const std::vector<std::shared_ptr<Region>>& regions, const std::vector<std::size_t>& firsts,
             const std::vector<std::size_t>& counts);
// Region::unmap for several, in order; those behind one that throws stay.
void unmap_all(const std::vector<std::shared_ptr<Region>>& regions, const std::vector<std::size_t>& firsts,
               const std::vector<std::size_t>& counts);

// Pages that are counted to an owner without an address: memory that another allocator hands out, kept within the
// arena's share. Destroying it gives them back.
class Claim {
 public:
  Claim(std::shared_ptr<detail::Pool> pool, std::string owner, std::size_t pages);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  std::size_t pages() const;
  // More or fewer. Throws ArenaFull with nothing changed.
  void resize(std::size_t pages);

 private:
  const std::shared_ptr<detail::Pool> pool_;
  const std::string owner_;
  mutable std::mutex mutex_;
  std::size_t pages_ = 0;
};

class Arena {
 public:
  // At most `capacity` pages of `backend` are ever in use.
  Arena(std::unique_ptr<Backend> backend, std::size_t capacity)
      : pool_(std::make_shared<detail::Pool>(std::move(backend), capacity)) {}

  std::string backend_name() const { return pool_->backend().name(); }
  std::size_t page_bytes() const { return pool_->page_bytes(); }

  std::shared_ptr<Region> reserve(std::string owner, std::size_t pages) {
    return std::make_shared<Region>(pool_, std::move(owner), pages);
  }
  std::shared_ptr<Claim> claim(std::string owner, std::size_t pages) {
    return std::make_shared<Claim>(pool_, std::move(owner), pages);
  }
  // Destroys the pages that are kept for reuse, so that others on the machine can have the memory. Answers how many.
  std::size_t trim() noexcept { return pool_->trim(); }
  Statistics statistics() const { return pool_->statistics(); }

 private:
  const std::shared_ptr<detail::Pool> pool_;
};

}  // namespace harli
