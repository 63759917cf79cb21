// The Python module core.memory._arena.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arena.hpp"
#include "driver.hpp"
#include "heap.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using harli::Arena;
using harli::Claim;
using harli::Heap;
using harli::OwnerUse;
using harli::Region;
using harli::Statistics;
using harli::Window;

namespace {

// Mapping is a chain of system or driver calls: other Python threads run meanwhile. Giving back is none, and to have its
// turn again would cost the thread milliseconds where the engine's keeps Python busy.
using Released = nb::call_guard<nb::gil_scoped_release>;

// Something whose end takes pages away from their addresses: other Python threads run meanwhile.
template <typename Held>
std::shared_ptr<Held> ends_released(std::shared_ptr<Held> held) {
  Held* at = held.get();
  return {at, [held = std::move(held)](Held*) mutable {
            if (!PyGILState_Check()) return held.reset();
            const nb::gil_scoped_release released;
            held.reset();
          }};
}

// (first page, pages, address in the host's memory) of each; 0: none.
using PyWindows = std::vector<std::tuple<std::size_t, std::size_t, std::uintptr_t>>;

std::vector<Window> windows_of(const PyWindows& windows) {
  std::vector<Window> made;
  made.reserve(windows.size());
  for (const auto& [first, count, host] : windows) made.push_back({first, count, reinterpret_cast<void*>(host)});
  return made;
}

struct PyArena {
  Arena arena;
  int device_id;  // -1: the CPU
};

// Bytes [offset, offset + length) of a region as a one-dimensional tensor of bytes, which keeps the region alive.
nb::ndarray<nb::pytorch, std::uint8_t> bytes_of(nb::handle self, std::size_t offset, std::size_t length, int device_id) {
  auto region = nb::cast<std::shared_ptr<Region>>(self);
  const std::size_t size = region->pages() * region->page_bytes();
  if (offset > size || length > size - offset) {
    throw harli::ArenaError(region->owner() + ": bytes " + std::to_string(offset) + " to " +
                            std::to_string(offset + length) + " of a region of " + std::to_string(size));
  }
  const std::size_t shape[1] = {length};
  return nb::ndarray<nb::pytorch, std::uint8_t>(reinterpret_cast<void*>(region->address() + offset), 1, shape, self,
                                                nullptr, nb::dtype<std::uint8_t>(),
                                                device_id < 0 ? nb::device::cpu::value : nb::device::cuda::value,
                                                device_id < 0 ? 0 : device_id);
}

}  // namespace

NB_MODULE(_arena, m) {
  nb::set_leak_warnings(false);  // tensors over regions live as long as the interpreter
  m.doc() = "An arena of physical pages: see core.memory.arena";

  nb::exception<harli::ArenaError> error(m, "ArenaError", PyExc_RuntimeError);
  nb::exception<harli::ArenaFull>(m, "ArenaFull", error.ptr());

  nb::class_<OwnerUse>(m, "OwnerUse")
      .def_ro("name", &OwnerUse::name)
      .def_ro("pages", &OwnerUse::pages)
      .def_ro("high_water", &OwnerUse::high_water);

  nb::class_<Statistics>(m, "Statistics")
      .def_ro("page_bytes", &Statistics::page_bytes)
      .def_ro("capacity", &Statistics::capacity)
      .def_ro("used", &Statistics::used)
      .def_ro("high_water", &Statistics::high_water)
      .def_ro("kept", &Statistics::kept)
      .def_ro("lost", &Statistics::lost)
      .def_ro("mapped", &Statistics::mapped)
      .def_ro("unmapped", &Statistics::unmapped)
      .def_ro("created", &Statistics::created)
      .def_ro("in_place", &Statistics::in_place)
      .def_ro("owners", &Statistics::owners);

  nb::class_<Region>(m, "Region")
      .def_prop_ro("address", &Region::address)
      .def_prop_ro("pages", &Region::pages)
      .def_prop_ro("page_bytes", &Region::page_bytes)
      .def_prop_ro("owner", &Region::owner)
      .def_prop_ro("mapped", &Region::mapped)
      .def("is_mapped", &Region::is_mapped, "first"_a, "count"_a = 1)
      .def("map", &Region::map, "first"_a, "count"_a, Released())
      .def("unmap", &Region::unmap, "first"_a, "count"_a)
      .def("move_out", [](Region& self, const PyWindows& windows) { self.move_out(windows_of(windows)); }, "windows"_a,
           Released())
      .def("move_in", [](Region& self, const PyWindows& windows) { self.move_in(windows_of(windows)); }, "windows"_a,
           Released())
      .def("bytes", &bytes_of, "offset"_a, "length"_a, "device_id"_a);

  // One turn without the interpreter for all of them, where other threads keep it busy.
  m.def("map_all", &harli::map_all, "regions"_a, "firsts"_a, "counts"_a, Released());
  m.def("unmap_all", &harli::unmap_all, "regions"_a, "firsts"_a, "counts"_a);

  nb::class_<Claim>(m, "Claim")
      .def_prop_ro("pages", &Claim::pages)
      .def("resize", &Claim::resize, "pages"_a, Released());

  nb::class_<Heap>(m, "Heap")
      .def("allocate", &Heap::allocate, "bytes"_a, Released())
      .def("free", &Heap::free, "address"_a, Released())
      .def_prop_ro("used", &Heap::used)
      .def_prop_ro("high_water", &Heap::high_water)
      .def_prop_rw("cap", &Heap::cap, &Heap::set_cap)
      .def_prop_ro("last_refusal", &Heap::last_refusal);

  nb::class_<PyArena>(m, "Arena")
      .def_prop_ro("backend", [](const PyArena& self) { return self.arena.backend_name(); })
      .def_ro("device_id", &PyArena::device_id)
      .def_prop_ro("page_bytes", [](const PyArena& self) { return self.arena.page_bytes(); })
      .def("reserve", [](PyArena& self, std::string owner, std::size_t pages) {
             return ends_released(self.arena.reserve(std::move(owner), pages));
           }, "owner"_a, "pages"_a)
      .def("claim", [](PyArena& self, std::string owner, std::size_t pages) {
             return self.arena.claim(std::move(owner), pages);
           }, "owner"_a, "pages"_a)
      .def("heap", [](PyArena& self, std::string owner, std::size_t cap, std::size_t pages) {
             return ends_released(std::make_shared<Heap>(self.arena, std::move(owner), cap, pages));
           }, "owner"_a, "cap"_a, "pages"_a)
      .def("trim", [](PyArena& self) { return self.arena.trim(); }, Released())
      .def("statistics", [](const PyArena& self) { return self.arena.statistics(); });

  m.def("memfd_arena", [](std::size_t page_bytes, std::size_t capacity) {
          return new PyArena{Arena(harli::memfd_backend(page_bytes, capacity), capacity), -1};
        }, "page_bytes"_a, "capacity"_a, nb::rv_policy::take_ownership);
  m.def("cuda_arena", [](int device_id, std::size_t capacity_bytes, std::size_t page_bytes) {
          auto backend = harli::cuda::backend(harli::cuda::system_driver(), device_id, page_bytes);
          const std::size_t capacity = capacity_bytes / backend->page_bytes();
          return new PyArena{Arena(std::move(backend), capacity), device_id};
        }, "device_id"_a, "capacity_bytes"_a, "page_bytes"_a, nb::rv_policy::take_ownership);
  m.def("select_heap", &harli::select_heap, "heap"_a.none());
}
