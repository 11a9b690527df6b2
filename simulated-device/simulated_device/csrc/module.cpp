// The extension module: what Python sees of the simulated device.
#include <torch/csrc/distributed/c10d/FakeProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "autocast.h"
#include "collectives.h"
#include "copies.h"
#include "device.h"
#include "kernels.h"
#include "progress.h"
#include "sparse.h"
#include "storages.h"
#include "streams.h"
#include "workers.h"

namespace sim {

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuardImpl);
REGISTER_ALLOCATOR(kSim, &device_allocator);

namespace {

// A group of any size in one process, for the CPU: every rank has what this one has.
class Lone final : public c10d::FakeProcessGroup {
 public:
  Lone(int rank, int size)
      : FakeProcessGroup(rank, size, c10::make_intrusive<FakeProcessGroup::Options>()) {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setSequenceNumberForGroup() override {}
};

Mode mode_named(const std::string& name) {
  if (name == "eager") return Mode::eager;
  if (name == "late") return Mode::late;
  if (name == "timed") return Mode::timed;
  TORCH_CHECK_VALUE(name == "random", "expected mode eager, late, random or timed, got ", name);
  return Mode::random;
}

SyncDebug sync_debug_named(const std::string& name) {
  if (name == "default") return SyncDebug::none;
  if (name == "warn") return SyncDebug::warn;
  TORCH_CHECK_VALUE(name == "error", "expected mode default, warn or error, got ", name);
  return SyncDebug::error;
}

std::vector<std::string> take_unordered_uses() {
  Lock lock;
  return Engine::get().take_unordered();
}

std::map<std::string, uint64_t> launches() {
  Lock lock;
  const auto& counts = Engine::get().launches;
  return {counts.begin(), counts.end()};
}

void define_measurements(py::module& module) {
  module.def("take_unordered_uses", &take_unordered_uses);
  module.def("launches", &launches);
  module.def("take_host_waits", [] {
    Lock lock;
    return std::exchange(Engine::get().host_waits, {});
  });
  module.def("host_seconds", [] {
    HostPause pause;
    Lock lock;
    return Engine::get().host_s;
  });
  module.def("take_spans", [] {
    Lock lock;
    auto& engine = Engine::get();
    std::vector<std::tuple<std::string, std::string, double, double>> found;
    for (const Span& span : std::exchange(engine.spans, {}))
      found.emplace_back(span.name, engine.name_of(span.stream), span.start, span.end);
    return found;
  });
  module.def("kernels_without_meta", [] {
    Lock lock;
    return Engine::get().without_meta;
  });
}

void define_settings(py::module& module) {
  module.def(
      "set_mode",
      [](const std::string& name, uint64_t seed, double chance) {
        Mode mode = mode_named(name);
        Lock lock;
        Engine::get().set_mode(lock, mode, seed, chance);
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("set_options", [](bool poison, bool orders, bool strict_pageable) {
    Lock lock;
    auto& options = Engine::get().options;
    options.poison = poison;
    options.orders = orders;
    options.strict_pageable = strict_pageable;
  });
  module.def("set_rates", [](const std::map<std::string, double>& given,
                             const std::map<std::string, double>& products) {
    Rates rates;
    const std::map<std::string, double*> fields{
        {"launch_s", &rates.launch_s},       {"host_factor", &rates.host_factor},
        {"kernel_s", &rates.kernel_s},       {"memory", &rates.memory},
        {"host_link", &rates.host_link},     {"node_link", &rates.node_link},
        {"network", &rates.network},         {"node_hop_s", &rates.node_hop_s},
        {"network_hop_s", &rates.network_hop_s}, {"other_products", &rates.other_products}};
    for (const auto& [name, value] : given) *fields.at(name) = value;
    const std::map<std::string, at::ScalarType> types{{"bfloat16", at::kBFloat16},
                                                      {"float16", at::kHalf},
                                                      {"float32", at::kFloat}};
    for (const auto& [name, value] : products) rates.products[types.at(name)] = value;
    Lock lock;
    Engine::get().rates = rates;
  });
  module.def("set_sync_debug_mode", [](const std::string& name) {
    SyncDebug mode = sync_debug_named(name);
    Lock lock;
    Engine::get().options.sync_debug = mode;
  });
  module.def("set_memory_limit", [](int64_t bytes) {
    Lock lock;
    for (DeviceIndex device = 0; device < Engine::get().num_devices(); device++)
      heap(device).set_limit(bytes);
  });
}

void define_device(py::module& module) {
  module.def("device_count", [] { return int{Engine::get().num_devices()}; });
  module.def("current_device", [] { return int{current_device}; });
  module.def("set_device", [](int index) {
    DeviceGuardImpl().setDevice(Device(kSim, static_cast<DeviceIndex>(index)));
  });
  module.def("is_forked", [] { return Engine::get().is_forked(); });
  module.def(
      "synchronize",
      [](int index) { DeviceGuardImpl().synchronizeDevice(static_cast<DeviceIndex>(index)); },
      py::call_guard<py::gil_scoped_release>());
  module.def("empty_cache", [] { device_allocator.emptyCache({0, 0}); },
             py::call_guard<py::gil_scoped_release>());
  module.def("default_generator", [](int index) {
    return default_generator(static_cast<DeviceIndex>(index));
  });
  module.def("host_register", [](uintptr_t address, size_t size) {
    Lock lock;
    PinnedMemory::get().add(reinterpret_cast<char*>(address), size);
  });
  module.def("host_unregister", [](uintptr_t address) {
    Lock lock;
    PinnedMemory::get().remove(reinterpret_cast<char*>(address));
  });
  module.def("end_process", [] { Engine::get().end_process(); },
             py::call_guard<py::gil_scoped_release>());
}

void define_backend(py::module& module) {
  py::module_::import("torch._C._distributed_c10d");
  // torch sets fields of a gloo group's options.
  py::class_<Lone, c10d::Backend, intrusive_ptr<Lone>>(module, "Lone", py::dynamic_attr())
      .def(py::init([](int rank, int size) { return c10::make_intrusive<Lone>(rank, size); }));
  py::class_<SimCCL, c10d::Backend, intrusive_ptr<SimCCL>>(module, "SimCCL")
      .def(py::init([](int rank, int size, intrusive_ptr<c10d::Backend> inner, int num_nodes) {
        return c10::make_intrusive<SimCCL>(rank, size, std::move(inner), num_nodes);
      }));
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static auto* hooks = new sim::Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  sim::define_measurements(module);
  sim::define_settings(module);
  sim::define_device(module);
  sim::define_backend(module);
}
