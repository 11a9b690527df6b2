// Random numbers of a device: a seed and the number of draws. Each draw seeds one kernel.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "streams.h"

namespace sim {

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(DeviceIndex device)
      : c10::GeneratorImpl(Device(kSim, device),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kSim; }

  // Returns the seed of the next kernel's own generator.
  uint64_t draw() {
    std::lock_guard<std::mutex> guard(mutex_);
    return mix(seed_ * 0x9E3779B97F4A7C15ull + ++draws_ * 0xD1B54A32D192ED03ull);
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    draws_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { draws_ = offset; }
  uint64_t get_offset() const override { return draws_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    auto* bytes = static_cast<char*>(state.data_ptr());
    memcpy(bytes, &seed_, sizeof seed_);
    memcpy(bytes + sizeof seed_, &draws_, sizeof draws_);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "RNG state of device sim must be ", kStateBytes, " bytes");
    auto* bytes = static_cast<const char*>(state.data());
    memcpy(&seed_, bytes, sizeof seed_);
    memcpy(&draws_, bytes + sizeof seed_, sizeof draws_);
  }

 private:
  static constexpr int64_t kStateBytes = 16;

  // The finalizer of splitmix64.
  static uint64_t mix(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
  }

  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->seed_ = seed_;
    copy->draws_ = draws_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t draws_ = 0;  // kernels seeded since the seed was set
};

inline const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (DeviceIndex index = 0; index < kMaxDevices; index++)
      made->push_back(at::make_generator<GeneratorImpl>(index));
    return made;
  }();
  return generators->at(device < 0 ? current_device : device);
}

// Draws a kernel's seed from `generator`, or from the device's default one.
inline uint64_t draw_seed(const std::optional<at::Generator>& generator, DeviceIndex device) {
  const at::Generator& chosen = generator ? *generator : default_generator(device);
  auto type = chosen.device().type();
  TORCH_CHECK(type == kSim, "Expected a 'sim' device type for generator but found '", type, "'");
  return static_cast<GeneratorImpl*>(chosen.unsafeGetGeneratorImpl())->draw();
}

}  // namespace sim
