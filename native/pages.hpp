// Physical pages, and the addresses that each of them is behind.
//
// A page that is given back stays behind its addresses until somebody takes it for others: the driver needs tens of
// microseconds to put a page there or to take it away, and several times as long while another thread launches work. So a
// page may be behind several addresses, of which at most one is in use, and where the same pages go to and fro between two
// ranges, each finds them in place from the second time on, and the driver is not asked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend.hpp"

namespace harli::detail {

// Thread-safe; calls for one range of addresses come one at a time.
class Pages {
 public:
  // At most `capacity` pages are ever there.
  Pages(Backend& backend, std::size_t capacity);
  ~Pages();

  // Puts a page behind each address from `address` on, and says which: the one that is there, if nobody uses it, else any
  // that is kept, else a new one. Throws ArenaFull or ArenaError with no page taken. With ArenaStuck some are lost, and
  // the driver may hold them behind these addresses for good.
  void put(std::uintptr_t address, std::span<Handle> pages);
  // Nobody uses the pages that were put there any more.
  void give_back(std::uintptr_t address, std::span<const Handle> pages) noexcept;
  // Leaves nothing behind `count` addresses, all of which were given back. False when the driver keeps some.
  bool clear(std::uintptr_t address, std::size_t count) noexcept;
  // Destroys kept pages until `most` are left; how many went.
  std::size_t keep_at_most(std::size_t most) noexcept;

  std::size_t kept() const;
  std::size_t lost() const noexcept { return lost_; }
  std::uint64_t created() const noexcept { return created_; }
  std::uint64_t in_place() const noexcept { return in_place_; }

 private:
  static constexpr std::size_t kInUse = static_cast<std::size_t>(-1);
  struct Page {
    std::size_t kept_at = kInUse;           // its place in `kept_`
    std::vector<std::uintptr_t> addresses;  // that it is behind
  };

  // With mutex_ held.
  bool take_in_place(std::uintptr_t address, Handle& page);
  void take(Handle page);
  void keep(Handle page) noexcept;

  // With driver_ held.
  void fill(std::uintptr_t address, std::span<Handle> pages, std::vector<bool>& has);
  void put_run(std::uintptr_t address, std::span<const Handle> pages);
  void take_away(std::uintptr_t address, std::size_t count);
  bool destroy_one(std::size_t most) noexcept;

  Backend& backend_;
  const std::size_t page_bytes_;
  std::atomic<std::uint64_t> created_{0}, in_place_{0};
  std::atomic<std::size_t> lost_{0};
  // Of whoever puts pages behind addresses or takes them away; taken before `mutex_`.
  std::mutex driver_;
  // Guards what follows, and is never held across a call of the back end: figures are read beside a long mapping.
  mutable std::mutex mutex_;
  std::unordered_map<Handle, Page> pages_;
  std::unordered_map<std::uintptr_t, Handle> behind_;
  std::vector<Handle> kept_;
};

}  // namespace harli::detail
