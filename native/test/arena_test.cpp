// The arena under a sanitizer: random operations against a model, failures of the driver, threads, any order of
// destruction. `arena_test [operations]`; exit status 0 when all of it held.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <semaphore>
#include <span>
#include <string>
#include <thread>

#include "arena.hpp"
#include "fake_driver.hpp"
#include "heap.hpp"

namespace {

using harli::Arena;
using harli::ArenaError;
using harli::ArenaFull;
using harli::Claim;
using harli::Heap;
using harli::Region;

constexpr std::size_t kPageBytes = 4096;

void require(bool held, const char* what, int line) {
  if (held) return;
  std::fprintf(stderr, "arena_test.cpp:%d: %s\n", line, what);
  std::exit(1);
}
#define REQUIRE(condition) require((condition), #condition, __LINE__)

template <typename Error, typename Call>
std::string refused(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool names(const std::string& words, const char* part) { return words.find(part) != std::string::npos; }

std::uint64_t& word(const Region& region, std::size_t page) {
  return *reinterpret_cast<std::uint64_t*>(region.address() + page * region.page_bytes());
}

std::size_t used_by(const Arena& arena, const std::string& owner) {
  for (const auto& use : arena.statistics().owners) {
    if (use.name == owner) return use.pages;
  }
  return 0;
}

// Pages as the host holds them: the first word of each says what it is.
using HostPages = std::vector<std::uint64_t>;
constexpr std::size_t kPageWords = kPageBytes / sizeof(std::uint64_t);

// Random maps, unmaps, moves to the host and back, claims and new regions; after each, pages in use, per owner and in
// all, and the content of a page, here and there, are what the model says.
void random_operations(Arena& arena, std::size_t capacity, std::size_t operations, unsigned seed) {
  constexpr std::size_t kRegions = 4, kPages = 24;
  std::mt19937 random(seed);
  const auto below = [&random](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  std::shared_ptr<Region> regions[kRegions];
  std::vector<std::uint64_t> content[kRegions];  // 0: not mapped
  HostPages host((kPages + 1) * kPageWords);
  std::shared_ptr<Claim> claim;
  std::uint64_t stamp = 0;
  std::size_t used = 0;
  const auto owner = [](std::size_t which) { return "owner " + std::to_string(which % 3); };
  for (std::size_t operation = 0; operation < operations; ++operation) {
    const std::size_t which = below(kRegions);
    auto& region = regions[which];
    auto& pages = content[which];
    if (!region) {
      region = arena.reserve(owner(which), kPages);
      pages.assign(kPages, 0);
    }
    const std::size_t first = below(kPages), count = below(kPages - first + 1);
    const auto mapped = static_cast<std::size_t>(
        std::count_if(pages.begin() + static_cast<std::ptrdiff_t>(first),
                      pages.begin() + static_cast<std::ptrdiff_t>(first + count), [](auto one) { return one != 0; }));
    switch (below(20)) {
      case 0: {
        used -= static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(), [](auto one) { return one != 0; }));
        region.reset();
        break;
      }
      case 1: {
        const std::size_t wanted = below(capacity);
        const std::size_t before = claim ? claim->pages() : 0;
        const bool fits = used - before + wanted <= capacity;
        const bool gone = refused<ArenaFull>([&] {
                            if (claim) claim->resize(wanted);
                            else claim = arena.claim("claimer", wanted);
                          }).empty();
        REQUIRE(gone == fits);
        if (fits) used = used - before + wanted;
        break;
      }
      case 2:
        if (claim) used -= claim->pages();
        claim.reset();
        break;
      case 3:
        arena.trim();
        break;
      case 4: case 5: case 6: case 7: case 8: case 9: {
        const std::string words = refused<ArenaError>([&] { region->map(first, count); });
        if (mapped > 0) {
          REQUIRE(names(words, "mapped already"));
        } else if (used + count > capacity) {
          REQUIRE(names(words, "are free"));
        } else {
          REQUIRE(words.empty());
          used += count;
          for (std::size_t page = first; page < first + count; ++page) word(*region, page) = pages[page] = ++stamp;
        }
        break;
      }
      case 10: case 11: {  // the last of three windows may be one that cannot be moved
        const std::size_t middle = first + count / 2, end = first + count;
        std::vector<harli::Window> windows{{middle, end - middle, &host[middle * kPageWords]},
                                           {first, middle - first, &host[first * kPageWords]}};
        if (below(2)) windows.push_back({below(kPages), 1, &host[kPages * kPageWords]});
        const std::string words = refused<ArenaError>([&] { region->move_out(windows); });
        const bool again = windows.size() == 3 && first <= windows[2].first && windows[2].first < end;
        bool held = true;
        for (const auto& window : windows) {
          for (std::size_t page = window.first; page < window.first + window.count; ++page) held &= pages[page] != 0;
        }
        REQUIRE(words.empty() == (held && !again) && (held || again || names(words, "is not mapped")));
        for (const auto& window : windows) {
          for (std::size_t page = 0; page < window.count && words.empty(); ++page) {
            REQUIRE(static_cast<std::uint64_t*>(window.host)[page * kPageWords] == pages[window.first + page]);
            pages[window.first + page] = 0;
            --used;
          }
        }
        for (std::size_t page = 0; page < kPages; ++page) REQUIRE(region->is_mapped(page, 1) == (pages[page] != 0));
        break;
      }
      case 12: case 13: {
        const std::size_t middle = first + count / 2, end = first + count;
        for (std::size_t page = first; page < middle; ++page) host[page * kPageWords] = ++stamp;
        const harli::Window windows[] = {{first, middle - first, &host[first * kPageWords]},
                                         {middle, end - middle, nullptr}};
        const std::string words = refused<ArenaError>([&] { region->move_in(windows); });
        bool free = true, fits = true;
        for (const auto& window : windows) {
          for (std::size_t page = window.first; page < window.first + window.count; ++page) free &= pages[page] == 0;
          fits = used + window.count <= capacity;
          if (!free || !fits) break;
          used += window.count;
          for (std::size_t page = window.first; page < window.first + window.count; ++page) {
            if (window.host == nullptr) {
              REQUIRE(word(*region, page) == 0 && (&word(*region, page))[kPageWords - 1] == 0);
              word(*region, page) = ++stamp;
            } else {
              REQUIRE(word(*region, page) == host[page * kPageWords]);
            }
            pages[page] = word(*region, page);
          }
        }
        REQUIRE(words.empty() == (free && fits));
        REQUIRE(words.empty() || names(words, free ? "are free" : "mapped already"));
        for (std::size_t page = 0; page < kPages; ++page) REQUIRE(region->is_mapped(page, 1) == (pages[page] != 0));
        break;
      }
      default: {
        const std::string words = refused<ArenaError>([&] { region->unmap(first, count); });
        if (mapped < count) {
          REQUIRE(names(words, "is not mapped"));
        } else {
          REQUIRE(words.empty());
          used -= count;
          std::fill_n(pages.begin() + static_cast<std::ptrdiff_t>(first), count, 0);
        }
      }
    }
    const auto said = arena.statistics();
    REQUIRE(said.used == used && said.used <= said.capacity && said.lost == 0);
    REQUIRE(said.kept + said.used <= capacity);
    if (region && pages[first] != 0) REQUIRE(word(*region, first) == pages[first]);
  }
  for (auto& region : regions) region.reset();
  claim.reset();
  REQUIRE(arena.statistics().used == 0);
}

void a_failed_mapping_leaves_nothing_behind() {
  Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 16);
  const auto region = arena.reserve("kv", 16);
  region->map(0, 2);
  word(*region, 0) = 7;
  for (int at : {0, 3, 7}) {
    fake::fail_map = at;
    const std::string words = refused<ArenaFull>([&] { region->map(2, 8); });
    REQUIRE(names(words, "cuMemMap: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"));
    REQUIRE(region->mapped() == 2 && used_by(arena, "kv") == 2 && fake::mappings.size() == 2);
  }
  fake::fail_access = 0;
  REQUIRE(names(refused<ArenaError>([&] { region->map(2, 8); }), "cuMemSetAccess: CUDA_ERROR_INVALID_VALUE"));
  REQUIRE(region->mapped() == 2 && fake::mappings.size() == 2);
  region->map(2, 8);
  REQUIRE(region->mapped() == 10 && word(*region, 0) == 7);
}

void several_regions_are_mapped_together_or_not_at_all() {
  for (int at : {0, 3, 5, 7}) {
    Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 16);
    const std::vector regions{arena.reserve("k", 8), arena.reserve("v", 8)};
    map_all(regions, {0, 0}, {2, 2});
    fake::fail_map = at;
    REQUIRE(!refused<ArenaFull>([&] { map_all(regions, {2, 2}, {4, 4}); }).empty());
    REQUIRE(regions[0]->mapped() == 2 && regions[1]->mapped() == 2 && arena.statistics().used == 4);
    REQUIRE(!refused<ArenaError>([&] { map_all(regions, {2, 2}, {6, 7}); }).empty());
    REQUIRE(regions[0]->mapped() == 2 && arena.statistics().used == 4);
    map_all(regions, {2, 2}, {4, 0});
    unmap_all(regions, {1, 1}, {5, 1});
    REQUIRE(regions[0]->mapped() == 1 && regions[1]->mapped() == 1 && arena.statistics().used == 2);
  }
}

// Nine pages of the host, each with its number, and the three windows that they go through.
struct Luggage {
  HostPages pages = HostPages(9 * kPageWords);
  std::vector<harli::Window> windows;

  Luggage() {
    for (std::size_t page = 0; page < 9; ++page) pages[page * kPageWords] = page + 1;
    for (std::size_t first = 0; first < 9; first += 3) windows.push_back({first, 3, &pages[first * kPageWords]});
  }
};

// Whatever fails on the way: the arena tells of each window where its content is, and there it is whole.
void a_move_that_fails_leaves_each_window_here_or_there() {
  const auto moved = [](Region& region, Luggage& host, std::size_t inside) {
    for (std::size_t which = 0; which < 3; ++which) {
      const bool here = which < inside;
      REQUIRE(region.is_mapped(3 * which, 3) == here && region.is_mapped(3 * which, 1) == here);
      for (std::size_t page = 3 * which; page < 3 * which + 3; ++page) {
        REQUIRE((here ? word(region, page) : host.pages[page * kPageWords]) == page + 1);
      }
    }
  };
  for (int* failing : {&fake::fail_copy, &fake::fail_wait}) {
    for (int at = 0; at < (failing == &fake::fail_copy ? 3 : 1); ++at) {
      Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 18);
      const auto region = arena.reserve("job", 9);
      Luggage host;
      region->move_in(host.windows);
      std::fill(host.pages.begin(), host.pages.end(), 0);
      *failing = at;
      REQUIRE(names(refused<ArenaError>([&] { region->move_out(host.windows); }), "CUDA_ERROR_INVALID_VALUE"));
      moved(*region, host, 3);
      REQUIRE(arena.statistics().used == 9);
      region->move_out(host.windows);
      moved(*region, host, 0);
      REQUIRE(arena.statistics().used == 0);
    }
  }
  for (int* failing : {&fake::fail_copy, &fake::fail_wait, &fake::fail_access, &fake::fail_map}) {
    const std::size_t each = failing == &fake::fail_map ? 3 : 1;
    for (std::size_t at = 0; at < 3 * each; ++at) {
      Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 9);
      const auto region = arena.reserve("job", 9);
      Luggage host;
      *failing = static_cast<int>(at);
      REQUIRE(names(refused<ArenaError>([&] { region->move_in(host.windows); }), "CUDA_ERROR_"));
      moved(*region, host, at / each);
      REQUIRE(arena.statistics().used == region->mapped() && arena.statistics().lost == 0);
      region->move_in(std::span(host.windows).subspan(at / each));
      moved(*region, host, 3);
    }
  }
  REQUIRE(fake::mappings.empty() && fake::handles.empty() && fake::depth == 0 && fake::streams == 0);
}

// Pages that go to and fro between two regions stay behind the addresses of both: from the second time on the driver is
// not asked. Content that was written here is there, since it is the same page.
void pages_that_come_again_are_in_place() {
  Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 8);
  const auto kv = arena.reserve("kv", 8), job = arena.reserve("job", 5);
  kv->map(0, 8);
  std::size_t asked = 0;
  for (int turn = 0; turn < 4; ++turn) {
    if (turn == 1) asked = fake::changes;
    kv->unmap(2, 6);
    job->map(0, 5);
    for (std::size_t page = 0; page < 5; ++page) word(*job, page) = 100 + page;
    job->unmap(0, 5);
    kv->map(2, 6);
    std::size_t seen = 0;
    for (std::size_t page = 2; page < 8; ++page) seen += word(*kv, page) >= 100 && word(*kv, page) < 105;
    REQUIRE(seen == 5);
  }
  REQUIRE(fake::changes == asked && arena.statistics().created == 8 && arena.statistics().in_place == 6 + 3 * 11);
  // Somebody else takes some of them: those are in place no more, the others still are.
  kv->unmap(2, 6);
  const auto other = arena.reserve("other", 3);
  other->map(0, 3);
  REQUIRE(names(refused<ArenaFull>([&] { kv->map(2, 6); }), "3 of 8 are free"));
  kv->map(2, 3);
  for (std::size_t page = 0; page < 3; ++page) word(*other, page) = 7;
  for (std::size_t page = 2; page < 5; ++page) word(*kv, page) = 8;
  for (std::size_t page = 0; page < 3; ++page) REQUIRE(word(*other, page) == 7 && word(*kv, page + 2) == 8);
  REQUIRE(arena.statistics().created == 8 && arena.statistics().used == 8);
}

// What was given back is destroyed wherever it still is; and what a region leaves behind itself is nobody else's trouble.
void pages_go_from_all_their_addresses() {
  Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 8);
  auto kv = arena.reserve("kv", 8), job = arena.reserve("job", 8);
  kv->map(0, 8);
  kv->unmap(0, 8);
  job->map(0, 4);
  REQUIRE(fake::mappings.size() == 12);
  job.reset();
  REQUIRE(fake::mappings.size() == 8 && arena.statistics().kept == 8);
  job = arena.reserve("job", 8);
  job->map(0, 4);
  kv.reset();
  REQUIRE(fake::mappings.size() == 4);
  REQUIRE(arena.trim() == 4 && fake::mappings.size() == 4 && fake::handles.size() == 4);
  job->unmap(0, 4);
  REQUIRE(arena.trim() == 4 && fake::mappings.empty() && fake::handles.empty());
  job->map(0, 8);
  REQUIRE(arena.statistics().created == 16);
}

// A back end whose copies take until somebody lets them go on.
class Slow final : public harli::Backend {
 public:
  std::string name() const override { return pages_->name(); }
  std::size_t page_bytes() const override { return pages_->page_bytes(); }
  std::uintptr_t reserve(std::size_t bytes) override { return pages_->reserve(bytes); }
  void free_range(std::uintptr_t address, std::size_t bytes) noexcept override { pages_->free_range(address, bytes); }
  harli::Handle create() override { return pages_->create(); }
  void destroy(harli::Handle page) noexcept override { pages_->destroy(page); }
  void map(std::uintptr_t address, std::span<const harli::Handle> pages) override { pages_->map(address, pages); }
  void unmap(std::uintptr_t address, std::size_t count) override { pages_->unmap(address, count); }
  void forbid(std::uintptr_t address, std::size_t count) noexcept override { pages_->forbid(address, count); }
  void allow(std::uintptr_t address, std::size_t count) override { pages_->allow(address, count); }
  void start_copy_out(void* host, std::uintptr_t address, std::size_t bytes) override {
    pages_->start_copy_out(host, address, bytes);
  }
  void finish_copies() override {
    stand();
    pages_->finish_copies();
  }
  void copy_in(std::uintptr_t address, const void* host, std::size_t bytes) override {
    stand();
    pages_->copy_in(address, host, bytes);
  }
  void zero(std::uintptr_t address, std::size_t bytes) override {
    stand();
    pages_->zero(address, bytes);
  }

  std::binary_semaphore stands{0}, goes_on{0};

 private:
  void stand() {
    stands.release();
    goes_on.acquire();
  }

  const std::unique_ptr<harli::Backend> pages_ = harli::memfd_backend(kPageBytes, 16);
};

void a_copy_keeps_nobody_waiting_and_its_pages_to_itself() {
  auto made = std::make_unique<Slow>();
  Slow& slow = *made;
  Arena arena(std::move(made), 16);
  const auto region = arena.reserve("job", 6);
  HostPages host(2 * kPageWords, 7);
  const harli::Window window[] = {{0, 2, host.data()}};
  for (const bool in : {true, false}) {
    std::thread moving([&] { in ? region->move_in(window) : region->move_out(window); });
    slow.stands.acquire();
    REQUIRE(names(refused<ArenaError>([&] { region->unmap(1, 1); }), "page 1 is being copied"));
    REQUIRE(names(refused<ArenaError>([&] { region->move_out(window); }), "page 0 is being copied"));
    REQUIRE(names(refused<ArenaError>([&] { region->map(1, 1); }), "page 1 is mapped already"));
    region->map(2, 4);
    arena.reserve("kv", 4)->map(0, 4);
    REQUIRE(region->mapped() == 6 && arena.statistics().used == 6);
    region->unmap(2, 4);
    slow.goes_on.release();
    moving.join();
    REQUIRE(region->mapped() == (in ? 2 : 0) && (!in || word(*region, 1) == 7));
  }
}

// A page that was given back, and that the driver would not take away from where it was.
void pages_that_the_driver_keeps_block_their_addresses() {
  {
    Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 8);
    auto region = arena.reserve("kv", 8);
    const auto job = arena.reserve("job", 4);
    region->map(0, 4);
    region->unmap(0, 4);
    job->map(0, 4);
    fake::fail_unmap = 0;
    REQUIRE(names(refused<ArenaError>([&] { region->map(0, 4); }), "cuMemUnmap"));
    REQUIRE(region->mapped() == 0 && arena.statistics().used == 4 && arena.statistics().kept == 4);
    region->map(0, 4);  // now it does
    region->unmap(0, 4);
    fake::fail_unmap = 0;
    REQUIRE(arena.trim() == 4);
    REQUIRE(arena.statistics().lost == 1);
    REQUIRE(names(refused<ArenaFull>([&] { arena.claim("claims", 4); }), "3 of 8 are free"));
    region->map(4, 3);
    word(*region, 4) = 1;
    REQUIRE(word(*job, 0) != 1);
    fake::fail_unmap = 0;
    region.reset();  // its range stays with the driver
    REQUIRE(arena.statistics().used == 4);
  }
  fake::mappings.clear();
  fake::handles.clear();
}

void a_mapping_that_cannot_be_rolled_back_is_lost_and_its_range_is_left() {
  {
    Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 8);
    auto region = arena.reserve("kv", 8);
    region->map(0, 1);
    fake::fail_map = 2;
    fake::fail_unmap = 0;
    REQUIRE(names(refused<harli::ArenaStuck>([&] { region->map(1, 4); }), "out of memory); then cuMemUnmap"));
    REQUIRE(region->mapped() == 1 && arena.statistics().lost == 4 && arena.statistics().used == 1);
    region.reset();
    REQUIRE(arena.statistics().used == 0 && arena.statistics().owners.empty() && fake::mappings.size() == 2);
  }
  fake::mappings.clear();
  fake::handles.clear();
}

void a_device_without_memory_is_told_from_a_full_arena() {
  Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 64);
  const auto region = arena.reserve("kv", 64);
  fake::physical_pages = fake::handles.size() + 10;
  REQUIRE(names(refused<ArenaFull>([&] { region->map(0, 20); }), "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"));
  REQUIRE(region->mapped() == 0 && arena.statistics().used == 0);
  region->map(0, 10);
  fake::physical_pages = 1 << 20;
}

void a_driver_that_unmaps_page_by_page_works_too() {
  fake::one_unmap_takes_a_run = false;
  {
    Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 64);
    random_operations(arena, 64, 2000, 3);
  }
  fake::one_unmap_takes_a_run = true;
  REQUIRE(fake::mappings.empty() && fake::handles.empty() && fake::depth == 0);
}

void regions_and_claims_outlive_their_arena() {
  std::shared_ptr<Region> region;
  std::shared_ptr<Claim> claim;
  {
    Arena arena(harli::memfd_backend(kPageBytes, 8), 8);
    region = arena.reserve("kv", 4);
    claim = arena.claim("job", 2);
    region->map(0, 2);
  }
  word(*region, 1) = 3;
  region->map(2, 2);
  region.reset();
  claim->resize(8);
}

void a_heap_keeps_its_cap_and_gives_all_back() {
  Arena arena(harli::memfd_backend(kPageBytes, 64), 64);
  {
    Heap heap(arena, "job", 10, 40);
    std::mt19937 random(5);
    std::vector<std::pair<std::uintptr_t, std::size_t>> blocks;
    std::size_t used = 0;
    for (int operation = 0; operation < 5000; ++operation) {
      if (random() % 2 && !blocks.empty()) {
        const std::size_t which = random() % blocks.size();
        heap.free(blocks[which].first);
        used -= blocks[which].second;
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
      } else {
        const std::size_t bytes = 1 + random() % (4 * kPageBytes);
        const std::size_t pages = (bytes + kPageBytes - 1) / kPageBytes;
        const bool fits = used + pages <= 10;
        std::uintptr_t address = 0;
        REQUIRE(refused<ArenaFull>([&] { address = heap.allocate(bytes); }).empty() == fits);
        if (fits) {
          std::memset(reinterpret_cast<void*>(address), 1, bytes);
          blocks.emplace_back(address, pages);
          used += pages;
        }
      }
      REQUIRE(heap.used() == used && used_by(arena, "job") == used);
    }
    REQUIRE(names(refused<ArenaError>([&] { heap.free(1); }), "no block begins"));
    heap.set_cap(0);
    REQUIRE(!refused<ArenaFull>([&] { heap.allocate(1); }).empty() && heap.used() == used);
  }
  REQUIRE(arena.statistics().used == 0);
}

void blocks_go_back_to_the_heap_they_came_from() {
  Arena arena(harli::memfd_backend(kPageBytes, 16), 16);
  REQUIRE(harli_malloc(1, 0, nullptr) == nullptr);
  harli::select_heap(std::make_shared<Heap>(arena, "first", 4, 8));
  void* of_first = harli_malloc(2 * kPageBytes, 0, nullptr);
  REQUIRE(of_first != nullptr && harli_malloc(4 * kPageBytes, 0, nullptr) == nullptr);
  harli::select_heap(std::make_shared<Heap>(arena, "second", 4, 8));
  void* of_second = harli_malloc(kPageBytes, 0, nullptr);
  REQUIRE(used_by(arena, "first") == 2 && used_by(arena, "second") == 1);
  harli_free(of_first, 2 * kPageBytes, 0, nullptr);
  harli::select_heap(nullptr);
  harli_free(of_second, kPageBytes, 0, nullptr);
  REQUIRE(arena.statistics().used == 0);
}

// One thread selects heaps while others take and free blocks: no block is left to nobody.
void heaps_change_while_blocks_come_and_go(std::size_t operations) {
  Arena arena(harli::memfd_backend(kPageBytes, 64), 64);
  {
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 3; ++number) {
      threads.emplace_back([&, number] {
        for (std::size_t operation = 0; operation < operations; ++operation) {
          if (number == 0) {
            harli::select_heap(operation % 3 ? std::make_shared<Heap>(arena, "job", 4, 8) : nullptr);
            continue;
          }
          void* block = harli_malloc(kPageBytes, 0, nullptr);
          if (block == nullptr) continue;
          std::memset(block, 1, kPageBytes);
          harli_free(block, kPageBytes, 0, nullptr);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  harli::select_heap(nullptr);
  REQUIRE(arena.statistics().used == 0 && arena.statistics().owners.empty());
}

// Threads map, move, claim and read figures at once; each region is also shared by two of them.
void threads_share_an_arena(std::unique_ptr<harli::Backend> pages, std::size_t capacity, std::size_t operations) {
  constexpr std::size_t kPages = 32;
  Arena arena(std::move(pages), capacity);
  {
    std::shared_ptr<Region> shared[2] = {arena.reserve("a", kPages), arena.reserve("b", kPages)};
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        std::mt19937 random(number);
        const auto own = arena.reserve("own", kPages);
        const auto claim = arena.claim("claims", 0);
        HostPages host(kPages * kPageWords);
        for (std::size_t operation = 0; operation < operations; ++operation) {
          Region& region = random() % 2 ? *own : *shared[number % 2];
          const std::size_t first = random() % kPages, count = random() % (kPages - first + 1);
          refused<ArenaError>([&] {
            const harli::Window windows[] = {{first, count, host.data()}};
            switch (random() % 7) {
              case 0: case 1: region.map(first, count); break;
              case 2: case 3: region.unmap(first, count); break;
              case 4: region.move_out(windows); break;
              case 5: region.move_in(windows); break;
              default: claim->resize(random() % 16);
            }
          });
          REQUIRE(arena.statistics().used <= capacity);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  REQUIRE(arena.statistics().used == 0 && arena.statistics().lost == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t operations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1'000'000;
  {
    Arena arena(harli::memfd_backend(kPageBytes, 40), 40);
    random_operations(arena, 40, operations, 1);
  }
  {
    Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 40);
    random_operations(arena, 40, operations / 20, 2);
  }
  REQUIRE(fake::mappings.empty() && fake::handles.empty() && fake::depth == 0 && fake::streams == 0);
  a_failed_mapping_leaves_nothing_behind();
  several_regions_are_mapped_together_or_not_at_all();
  a_move_that_fails_leaves_each_window_here_or_there();
  pages_that_come_again_are_in_place();
  pages_go_from_all_their_addresses();
  a_copy_keeps_nobody_waiting_and_its_pages_to_itself();
  pages_that_the_driver_keeps_block_their_addresses();
  a_mapping_that_cannot_be_rolled_back_is_lost_and_its_range_is_left();
  a_device_without_memory_is_told_from_a_full_arena();
  a_driver_that_unmaps_page_by_page_works_too();
  regions_and_claims_outlive_their_arena();
  a_heap_keeps_its_cap_and_gives_all_back();
  blocks_go_back_to_the_heap_they_came_from();
  heaps_change_while_blocks_come_and_go(operations / 100);
  threads_share_an_arena(harli::memfd_backend(kPageBytes, 96), 96, operations / 50);
  threads_share_an_arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 96, operations / 200);
  std::printf("%zu random operations and the rest held\n", operations);
  return 0;
}
