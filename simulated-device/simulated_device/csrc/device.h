// How torch reaches the device: events, the device guard, and the hooks of an accelerator.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

#include "allocator.h"
#include "generator.h"
#include "pinned.h"
#include "streams.h"

namespace sim {

// What an event stands for since it was last recorded.
struct Event {
  Moment moment;
  std::shared_ptr<Time> finished_at;  // set by the device
  int num_queries = 0;                // by the host, since it was recorded
};

inline DeviceIndex index_or_current(Device device) {
  return device.has_index() ? device.index() : current_device;
}

struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return Engine::get().num_devices(); }

  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "sim: there is no device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }

  c10::Stream getStream(Device device) const override {
    DeviceIndex index = index_or_current(device);
    return stream_of(index, current_stream_id(index));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream_of(index_or_current(device), 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    Lock lock;
    return stream_of(index_or_current(device), Engine::get().new_stream_id());
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    return Engine::get().is_finished(Engine::get().moment(index_of(stream)).point);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    Engine::get().count_host_wait("stream.synchronize");
    Engine::get().synchronize_stream(lock, index_of(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock;
    Engine::get().count_host_wait("synchronize", true);
    Engine::get().synchronize_device(lock, device < 0 ? current_device : device);
    Engine::get().raise_unordered();
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex,
              c10::EventFlag) const override {
    Lock lock;
    auto& engine = Engine::get();
    StreamIndex index = index_of(stream);
    auto finished_at = std::make_shared<Time>();
    engine.launch(lock, index, {.name = "record", .finished_at = finished_at});
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = {engine.moment(index), finished_at};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock;
    Engine::get().wait(lock, index_of(stream), static_cast<Event*>(event)->moment);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& recorded = *static_cast<Event*>(event);
    Lock lock;
    auto& engine = Engine::get();
    // A host that asks again and again must see the device go on.
    constexpr int kPatience = 2;
    bool is_finished = engine.is_finished(recorded.moment.point);
    if (!is_finished && ++recorded.num_queries > kPatience)
      is_finished = engine.try_advance(lock, recorded.moment.point);
    if (is_finished) engine.host_learns(recorded.moment.clock);
    return is_finished;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock;
    Engine::get().count_host_wait("event.synchronize", true);
    Engine::get().synchronize(lock, static_cast<Event*>(event)->moment);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from && to, "sim: both events must be recorded");
    Lock lock;
    auto& engine = Engine::get();
    TORCH_CHECK(engine.is_finished(from->moment.point) && engine.is_finished(to->moment.point),
                "sim: both events must be completed");
    return std::chrono::duration<double, std::milli>(*to->finished_at - *from->finished_at).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_allocator.recordStream(memory, stream);
  }

 private:
  static StreamIndex index_of(const c10::Stream& stream) {
    return Engine::get().index_of(stream.device_index(), stream.id());
  }
};

// Changes how many bytes a storage has, and keeps those that fit.
inline void resize_bytes(c10::StorageImpl& storage, size_t size) {
  size_t kept = std::min(size, storage.nbytes());
  if (size == storage.nbytes()) return;
  c10::DeviceGuard guard(storage.device());
  auto memory = device_allocator.allocate(size);
  if (kept) device_allocator.copy_data(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}

  DeviceIndex deviceCount() const override { return Engine::get().num_devices(); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock;
    return Device(kSim, device_of(address).value_or(current_device));
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device : device);
  }

  bool isPinnedPtr(const void* address) const override {
    Lock lock;
    return PinnedMemory::get().contains(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_bytes(*storage.unsafeGetStorageImpl(), size);
  }
};

}  // namespace sim
