// Pages of one anonymous file: a page is a piece of the file, mapping is mmap over a reserved range.
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend.hpp"

namespace harli {
namespace {

[[noreturn]] void refuse(const char* call, int error) {
  const std::string words = std::string(call) + ": " + std::strerror(error);
  if (error == ENOMEM || error == ENOSPC) throw ArenaFull(words);
  throw ArenaError(words);
}

class MemfdBackend final : public Backend {
 public:
  MemfdBackend(std::size_t page_bytes, std::size_t capacity_pages) : page_bytes_(page_bytes) {
    const auto system_page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    if (page_bytes == 0 || page_bytes % system_page != 0) {
      throw ArenaError("a page of " + std::to_string(page_bytes) + " bytes is no multiple of the system's " +
                       std::to_string(system_page));
    }
    file_ = ::memfd_create("harli-arena", MFD_CLOEXEC);
    if (file_ < 0) refuse("memfd_create", errno);
    // The file is sparse: a page costs memory from its first touch until it is destroyed.
    if (::ftruncate(file_, static_cast<off_t>(capacity_pages * page_bytes)) != 0) {
      const int error = errno;
      ::close(file_);
      refuse("ftruncate", error);
    }
    free_.reserve(capacity_pages);
    for (std::size_t page = capacity_pages; page > 0; --page) free_.push_back(page - 1);
  }

  ~MemfdBackend() override { ::close(file_); }

  std::string name() const override { return "memfd"; }
  std::size_t page_bytes() const override { return page_bytes_; }

  std::uintptr_t reserve(std::size_t bytes) override {
    void* address = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) refuse("mmap", errno);
    return reinterpret_cast<std::uintptr_t>(address);
  }

  void free_range(std::uintptr_t address, std::size_t bytes) noexcept override {
    ::munmap(reinterpret_cast<void*>(address), bytes);
  }

  Handle create() override {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) throw ArenaFull("memfd: the file has no page left");
    const Handle page = free_.back();
    free_.pop_back();
    return page;
  }

  void destroy(Handle page) noexcept override {
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(page * page_bytes_),
                static_cast<off_t>(page_bytes_));
    const std::lock_guard lock(mutex_);
    free_.push_back(page);
  }

  void map(std::uintptr_t address, std::span<const Handle> pages) override {
    std::size_t done = 0;
    while (done < pages.size()) {
      // Neighbours in the file are mapped by one call, and are one mapping to the kernel, which counts them.
      std::size_t count = 1;
      while (done + count < pages.size() && pages[done + count] == pages[done] + count) ++count;
      void* place = reinterpret_cast<void*>(address + done * page_bytes_);
      void* got = ::mmap(place, count * page_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
                         static_cast<off_t>(pages[done] * page_bytes_));
      if (got == MAP_FAILED) {
        const int error = errno;
        // What was there before may be gone too, and the addresses anybody's: they are taken again.
        try {
          unmap(address, done + count);
        } catch (const ArenaError& then) {
          throw ArenaStuck(std::string("mmap: ") + std::strerror(error) + "; then " + then.what());
        }
        refuse("mmap", error);
      }
      done += count;
    }
  }

  void unmap(std::uintptr_t address, std::size_t count) override {
    void* got = ::mmap(reinterpret_cast<void*>(address), count * page_bytes_, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (got == MAP_FAILED) refuse("mmap", errno);
  }

  void forbid(std::uintptr_t address, std::size_t count) noexcept override {
    ::mprotect(reinterpret_cast<void*>(address), count * page_bytes_, PROT_NONE);
  }

  void allow(std::uintptr_t address, std::size_t count) override {
    if (::mprotect(reinterpret_cast<void*>(address), count * page_bytes_, PROT_READ | PROT_WRITE) != 0) {
      refuse("mprotect", errno);
    }
  }

  void start_copy_out(void* host, std::uintptr_t address, std::size_t bytes) override {
    std::memcpy(host, reinterpret_cast<const void*>(address), bytes);
  }

  void finish_copies() override {}

  void copy_in(std::uintptr_t address, const void* host, std::size_t bytes) override {
    std::memcpy(reinterpret_cast<void*>(address), host, bytes);
  }

  void zero(std::uintptr_t address, std::size_t bytes) override {
    std::memset(reinterpret_cast<void*>(address), 0, bytes);
  }

 private:
  const std::size_t page_bytes_;
  int file_ = -1;
  std::mutex mutex_;
  std::vector<Handle> free_;
};

}  // namespace

std::unique_ptr<Backend> memfd_backend(std::size_t page_bytes, std::size_t capacity_pages) {
  return std::make_unique<MemfdBackend>(page_bytes, capacity_pages);
}

}  // namespace harli
