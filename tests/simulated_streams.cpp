// Streams and events of the simulated accelerator: what has certainly ended before what begins.
//
// Nothing is queued here: operations are computed at once (simulated.py). Each stream counts its
// operations and knows of every other stream how many of that one's have ended before its own next
// one begins (a vector clock), which is what events and waits are for. simulated_streams.py asks
// that for each access to memory. torch asks this file for streams, as it asks every backend, so
// autograd, torch.Stream and torch.Event know them.

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#ifdef SIM_IS_CUDA
#include <ATen/detail/CUDAHooksInterface.h>
#endif

namespace {

constexpr int kPool = 32;  // torch.Stream() gives one of these, in turns; 0 is the default stream
constexpr int kAll = 96;   // those from kPool on belong to groups of ranks
using Clock = std::array<uint64_t, kAll>;

struct Recorded {
  Clock ended;
};

std::mutex mutex;
std::array<Clock, kAll> clocks;
Clock host;  // what the host has waited for: all that it starts later begins after that
int made = 0;
thread_local int64_t current = 0;
void (*host_waits)() = nullptr;

constexpr c10::DeviceType kType = c10::DeviceType::SIM_KEY;
int devices = 1;
thread_local c10::DeviceIndex device = 0;

void merge(Clock& into, const Clock& from) {
  for (int k = 0; k < kAll; ++k) into[k] = std::max(into[k], from[k]);
}

void wait_of_the_host(const Clock& ended) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    merge(host, ended);
  }
  if (host_waits != nullptr) host_waits();
}

c10::Stream stream_of(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

Clock clock_of(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return clocks.at(stream);
}

Clock everything() {
  std::lock_guard<std::mutex> lock(mutex);
  Clock ended{};
  for (const Clock& each : clocks) merge(ended, each);
  return ended;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device other) const override {
    const c10::Device before = getDevice();
    setDevice(other);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, device); }
  void setDevice(c10::Device other) const override {
    TORCH_CHECK(other.index() < devices, "sim: invalid device ordinal ", int(other.index()));
    uncheckedSetDevice(other);
  }
  void uncheckedSetDevice(c10::Device other) const noexcept override {
    if (other.index() >= 0) device = other.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> lock(mutex);
    return stream_of(1 + made++ % (kPool - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t before = current;
    current = stream.id();
    return stream_of(before);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (*event == nullptr) *event = new Recorded();
    static_cast<Recorded*>(*event)->ended = clocks.at(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex);
    merge(clocks.at(stream.id()), static_cast<Recorded*>(event)->ended);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_of_the_host(static_cast<Recorded*>(event)->ended);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_of_the_host(clock_of(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_of_the_host(everything()); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(SIM_KEY, Guard);

}  // namespace

#ifdef SIM_IS_CUDA
namespace {

// What torch asks whether there is CUDA.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return device; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
};

// torch has made the object that it asks while it was imported: it becomes this one.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;

}  // namespace
#endif

extern "C" {

// There are so many devices.
void sim_set_devices(int count) { devices = count; }

// The index of this thread's current device.
int sim_device() { return device; }

// The stream in which this thread starts operations.
int64_t sim_stream() { return current; }

// Start an operation in a stream; returns its number there.
uint64_t sim_begin(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Clock& clock = clocks.at(stream);
  merge(clock, host);
  return ++clock[stream];
}

// Whether that operation of `other` has ended before the last one of `stream` began, or before the
// host went on, if `stream` is -1.
bool sim_has_ended(int64_t stream, int64_t other, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  return (stream < 0 ? host : clocks.at(stream)).at(other) >= number;
}

// Call this whenever the host waits.
void sim_on_host_waits(void (*function)()) { host_waits = function; }
}
