// The arena under a sanitizer: random operations against a model, failures of the driver, threads, any order of
// destruction. `arena_test [operations]`; exit status 0 when all of it held.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
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

// Random maps, unmaps, claims and new regions; after each, pages in use, per owner and in all, and the content of a
// page are what the model says.
void random_operations(Arena& arena, std::size_t capacity, std::size_t operations, unsigned seed) {
  constexpr std::size_t kRegions = 4, kPages = 24;
  std::mt19937 random(seed);
  const auto below = [&random](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  std::shared_ptr<Region> regions[kRegions];
  std::vector<std::uint64_t> content[kRegions];  // 0: not mapped
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
    switch (below(16)) {
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
  Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 16);
  const std::vector regions{arena.reserve("k", 8), arena.reserve("v", 8)};
  map_all(regions, {0, 0}, {2, 2});
  for (int at : {0, 3, 5, 7}) {
    fake::fail_map = at;
    REQUIRE(!refused<ArenaFull>([&] { map_all(regions, {2, 2}, {4, 4}); }).empty());
    REQUIRE(regions[0]->mapped() == 2 && regions[1]->mapped() == 2 && arena.statistics().used == 4);
  }
  REQUIRE(!refused<ArenaError>([&] { map_all(regions, {2, 2}, {6, 7}); }).empty());
  REQUIRE(regions[0]->mapped() == 2 && arena.statistics().used == 4);
  map_all(regions, {2, 2}, {4, 0});
  unmap_all(regions, {1, 1}, {5, 1});
  REQUIRE(regions[0]->mapped() == 1 && regions[1]->mapped() == 1 && arena.statistics().used == 2);
}

void pages_that_the_driver_keeps_are_counted_as_lost() {
  {
    Arena arena(harli::cuda::backend(fake::driver, 0, kPageBytes), 8);
    auto region = arena.reserve("kv", 8);
    region->map(0, 4);
    fake::fail_unmap = 0;
    REQUIRE(names(refused<ArenaError>([&] { region->unmap(0, 4); }), "cuMemUnmap"));
    REQUIRE(arena.statistics().lost == 4 && arena.statistics().used == 0);
    REQUIRE(names(refused<ArenaFull>([&] { arena.claim("job", 5); }), "4 of 8 are free"));
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

// Threads map, claim and read figures at once; each region is also shared by two of them.
void threads_share_an_arena(std::size_t operations) {
  constexpr std::size_t kCapacity = 96, kPages = 32;
  Arena arena(harli::memfd_backend(kPageBytes, kCapacity), kCapacity);
  {
    std::shared_ptr<Region> shared[2] = {arena.reserve("a", kPages), arena.reserve("b", kPages)};
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        std::mt19937 random(number);
        const auto own = arena.reserve("own", kPages);
        const auto claim = arena.claim("claims", 0);
        for (std::size_t operation = 0; operation < operations; ++operation) {
          Region& region = random() % 2 ? *own : *shared[number % 2];
          const std::size_t first = random() % kPages, count = random() % (kPages - first + 1);
          refused<ArenaError>([&] {
            switch (random() % 5) {
              case 0: case 1: region.map(first, count); break;
              case 2: case 3: region.unmap(first, count); break;
              default: claim->resize(random() % 16);
            }
          });
          REQUIRE(arena.statistics().used <= kCapacity);
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
  REQUIRE(fake::mappings.empty() && fake::handles.empty() && fake::depth == 0);
  a_failed_mapping_leaves_nothing_behind();
  several_regions_are_mapped_together_or_not_at_all();
  pages_that_the_driver_keeps_are_counted_as_lost();
  a_mapping_that_cannot_be_rolled_back_is_lost_and_its_range_is_left();
  a_device_without_memory_is_told_from_a_full_arena();
  a_driver_that_unmaps_page_by_page_works_too();
  regions_and_claims_outlive_their_arena();
  a_heap_keeps_its_cap_and_gives_all_back();
  blocks_go_back_to_the_heap_they_came_from();
  heaps_change_while_blocks_come_and_go(operations / 100);
  threads_share_an_arena(operations / 50);
  std::printf("%zu random operations and the rest held\n", operations);
  return 0;
}
