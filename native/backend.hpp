// What an arena needs of a machine: address ranges, physical pages, and putting the one behind the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

namespace harli {

// A call of the driver or the kernel failed, or the arena was used against its rules. The message carries the words of
// whoever refused.
class ArenaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// There is no page left: of the arena's share, or of the device itself.
class ArenaFull : public ArenaError {
 public:
  using ArenaError::ArenaError;
};

// A mapping failed half-way and could not be rolled back: some of its pages are still behind addresses.
class ArenaStuck : public ArenaError {
 public:
  using ArenaError::ArenaError;
};

// One physical page, by the name that its back end gives it.
using Handle = std::uint64_t;

// Thread-safe: calls for disjoint address ranges and distinct handles may run at once.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;
  virtual std::size_t page_bytes() const = 0;

  // An address range that nothing is behind. Throws ArenaError.
  virtual std::uintptr_t reserve(std::size_t bytes) = 0;
  // Gives a range back; nothing may be mapped in it.
  virtual void free_range(std::uintptr_t address, std::size_t bytes) noexcept = 0;

  // A physical page. Throws ArenaFull when the device has none.
  virtual Handle create() = 0;
  virtual void destroy(Handle page) noexcept = 0;

  // Puts `pages` behind the addresses from `address` on, readable and writable. Throws ArenaError with nothing mapped, or
  // ArenaStuck.
  virtual void map(std::uintptr_t address, std::span<const Handle> pages) = 0;
  // Takes away what `map` put behind `count` pages' worth of addresses. Throws ArenaError.
  virtual void unmap(std::uintptr_t address, std::size_t count) = 0;
  // Makes it an error to touch these pages from these addresses, where that costs little, and takes that back. Throws
  // ArenaError.
  virtual void forbid(std::uintptr_t address, std::size_t count) noexcept = 0;
  virtual void allow(std::uintptr_t address, std::size_t count) = 0;

  // Copies between mapped addresses and memory of the host; through when they return, but for `start_copy_out`: that is
  // through once `finish_copies` returns. On a GPU they run beside whatever computes, and what computes with these
  // addresses has ended. Throw ArenaError.
  virtual void start_copy_out(void* host, std::uintptr_t address, std::size_t bytes) = 0;
  virtual void finish_copies() = 0;
  virtual void copy_in(std::uintptr_t address, const void* host, std::size_t bytes) = 0;
  virtual void zero(std::uintptr_t address, std::size_t bytes) = 0;
};

// Pages of one anonymous file in memory, for machines without a GPU. `page_bytes` is a multiple of the system's page.
std::unique_ptr<Backend> memfd_backend(std::size_t page_bytes, std::size_t capacity_pages);

}  // namespace harli
