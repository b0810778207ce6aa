// What torch asks of an accelerator in C++, for fake_device.py: an allocator, the current device and
// streams of each thread, views, and autocast. All that decides anything is in Python, which is
// called through the table of functions below.
//
// Headers that include all of torch's operations, such as autocast_mode.h, would take most of the time
// to build this.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <span>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;

struct Functions {  // in the order of fake_device.py's `_Functions`
  void* (*allocate)(size_t, int);
  void (*release)(void*);
  int64_t (*record)(int64_t, int);
  void (*block)(int64_t, int64_t, int);
  int (*query)(int64_t);
  void (*synchronize_event)(int64_t);
  void (*destroy)(int64_t);
  void (*synchronize_stream)(int64_t, int);
  void (*record_memory)(void*, int64_t, int);
  int64_t (*new_stream)(int);
};

Functions functions{};  // without any before Python gives them, and when Python ends
thread_local int current_device = 0;
thread_local int64_t current_streams[kDevices] = {};

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned;

void release(void* memory) {
  if (memory != nullptr && functions.release != nullptr) functions.release(memory);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    TORCH_CHECK(functions.allocate != nullptr, "the fake device is closed");
    void* memory = functions.allocate(bytes, current_device);
    TORCH_CHECK_WITH(
        OutOfMemoryError, memory != nullptr, "fake out of memory. Tried to allocate ", bytes, " bytes.");
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

void release_pinned(void* memory) {
  if (memory == nullptr) return;
  std::lock_guard<std::mutex> lock(pinned_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(memory));
  std::free(memory);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned[reinterpret_cast<uintptr_t>(memory)] = bytes + 1;
    return {memory, memory, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

Memory memory;
PinnedMemory pinned_memory;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto next = pinned.upper_bound(at);
  if (next == pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, current_device);
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  static c10::Device full(c10::Device device) {
    return device.has_index() ? device : c10::Device(kType, current_device);
  }
  c10::Stream getStream(c10::Device given) const override {
    const auto device = full(given);
    return stream(device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(full(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device given, int) const override {
    const auto device = full(given);
    return stream(device, functions.new_stream(device.index()));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream(next.device(), current_streams[next.device_index()]);
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag) const override {
    destroyEvent(*event, index);
    *event = reinterpret_cast<void*>(functions.record(stream.id(), stream.device_index()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) functions.block(key(event), stream.id(), stream.device_index());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || functions.query(key(event)) != 0;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) functions.synchronize_event(key(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr && functions.destroy != nullptr) functions.destroy(key(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const int64_t event = functions.record(stream.id(), stream.device_index());
    const bool is_done = functions.query(event) != 0;
    functions.destroy(event);
    return is_done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    functions.synchronize_stream(stream.id(), stream.device_index());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) functions.record_memory(data.get(), stream.id(), stream.device_index());
  }
  static int64_t key(void* event) { return reinterpret_cast<int64_t>(event); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const int before = current_device;
    current_device = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake device has no generator");
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(Guard::full(device.value_or(c10::Device(kType))));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(Guard::full(device.value_or(c10::Device(kType))));
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  c10::StorageImpl* const storage = self.storage().unsafeGetStorageImpl();
  const size_t needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(),
                                                                   self.storage_offset());
  if (storage->nbytes() > 0 && needed > storage->nbytes() && storage->resizable()) {
    c10::DataPtr larger = memory.allocate(needed);
    // The host copies the content: after what the stream writes to either memory, which includes
    // what the new one held before being overwritten.
    functions.synchronize_stream(current_streams[current_device], current_device);
    std::memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(needed);
  }
  return at::native::resize_(self, size, format);
}

// The same memory for a kernel of the host's. Whoever uses it has to do so in stream order.
at::Tensor host_view(const at::Tensor& self) {
  const c10::InferenceMode no_inference(false);
  auto view = at::from_blob(self.mutable_data_ptr(), self.sizes(), self.strides(),
                            self.options().device(c10::DeviceType::CPU));
  if (self.is_conj()) view._set_conj(true);
  if (self.is_neg()) view._set_neg(true);
  return view;
}

// As Ascend/pytorch (torch_npu) does by the same function: else `tensor.data` could not be
// set to one of the other kind, and `Module.to` would make new parameters.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    const auto keys = tensor.key_set();
    return keys.has(c10::DispatchKey::CPU) || keys.has(c10::DispatchKey::PrivateUse1);
  };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}

TORCH_LIBRARY(kaitian_fake, library) {
  library.def("host_view(Tensor self) -> Tensor");
}

TORCH_LIBRARY_IMPL(kaitian_fake, PrivateUse1, library) {
  library.impl("host_view", host_view);
}

// Copies resolve these bits themselves, as `copy_` does.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(kaitian_fake, Conjugate, library) {
  library.impl("host_view", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(kaitian_fake, Negative, library) {
  library.impl("host_view", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

// torch 2.8 leaves to the vendor what later releases do themselves.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  constexpr auto key = c10::DispatchKey::AutogradPrivateUse1;
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key)) {
    library.fallback(torch::CppFunction::makeFallthrough());
  }
}

}  // namespace

// Of ATen/autocast_mode.h, whose lists of operations by policy extension.py gives as well.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace {

// The contract is `WrapFunction_` in ATen/autocast_mode.h, with a specialization for each policy:
// these do the same for any operation, by the arguments on the stack and their types in the schema.
enum class Policy { lower_precision_fp, fp32, fp32_set_opt_dtype, fp32_append_dtype, promote };

// `is_eligible`
bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

// `prioritize`
at::ScalarType wider(at::ScalarType current, const at::Tensor& tensor) {
  TORCH_CHECK(current != at::kDouble, "promote type is double in at::autocast::prioritize");
  if (!is_eligible(tensor)) return current;
  if (current == at::kFloat || tensor.scalar_type() == at::kFloat) return at::kFloat;
  const auto lower = at::autocast::get_autocast_dtype(kType);
  TORCH_CHECK(current == lower && tensor.scalar_type() == lower,
              "Unexpected floating ScalarType in at::autocast::prioritize");
  return lower;
}

// `promote_type`, which leaves out optional tensors.
at::ScalarType widest(std::span<const c10::IValue> values,
                      const std::vector<c10::Argument>& arguments) {
  auto current = at::autocast::get_autocast_dtype(kType);
  for (size_t i = 0; i < values.size(); ++i) {
    if (arguments[i].type()->kind() == c10::TypeKind::OptionalType) continue;
    if (values[i].isTensor()) current = wider(current, values[i].toTensor());
    if (!values[i].isTensorList()) continue;
    for (const at::Tensor& tensor : values[i].toTensorVector()) current = wider(current, tensor);
  }
  return current;
}

// `cached_cast` of a tensor, or of a new list, as the caller may use the given one again.
void cast(at::ScalarType to, c10::IValue& value) {
  if (value.isTensor()) {
    value = at::autocast::cached_cast(to, value.toTensor(), kType);
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = at::autocast::cached_cast(to, tensor, kType);
    value = std::move(tensors);
  }
}

template <Policy policy>
void autocast(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = operation.schema().arguments();
  const auto values = std::span(*stack).last(arguments.size());
  if constexpr (policy == Policy::fp32_append_dtype) {
    const auto& first = values[0].toTensor();
    stack->emplace_back(is_eligible(first) ? at::kFloat : first.scalar_type());
    const bool has_dim = operation.schema().overload_name() == "ScalarOpt_dim";
    c10::Dispatcher::singleton()
        .findSchemaOrThrow("aten::norm", has_dim ? "ScalarOpt_dim_dtype" : "ScalarOpt_dtype")
        .callBoxed(stack);
    return;
  }
  if constexpr (policy == Policy::fp32_set_opt_dtype) {
    const auto dtype = c10::OptionalType::create(c10::ScalarTypeType::get());
    for (size_t i = 0; i < values.size() && is_eligible(values[0].toTensor()); ++i) {
      if (values[i].isNone() && *arguments[i].real_type() == *dtype) values[i] = at::kFloat;
    }
  } else {
    const auto to = policy == Policy::fp32      ? at::kFloat
                    : policy == Policy::promote ? widest(values, arguments)
                                                : at::autocast::get_autocast_dtype(kType);
    for (c10::IValue& value : values) cast(to, value);
  }
  operation.callBoxed(stack);
}

#define REGISTER(NAME, POLICY) \
  library.impl(NAME, torch::CppFunction::makeFromBoxedFunction<&autocast<Policy::POLICY>>());
#define NAME(OPERATION, ...) #OPERATION __VA_OPT__("." #__VA_ARGS__)
#define LOW(...) REGISTER(NAME(__VA_ARGS__), lower_precision_fp)
#define FP32(...) REGISTER(NAME(__VA_ARGS__), fp32)
#define SET(...) REGISTER(NAME(__VA_ARGS__), fp32_set_opt_dtype)
#define OTHER(FUNCTION, NAME, SIGNATURE, OTHER_SIGNATURE, POLICY) REGISTER(NAME, POLICY)
#define PROMOTE(...) REGISTER(NAME(__VA_ARGS__), promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(OTHER)
  AT_FORALL_PROMOTE(PROMOTE)
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

extern "C" {

void fake_start(const Functions* given) {
  functions = *given;
  c10::SetAllocator(kType, &memory);
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new Hooks);
}

void fake_end() { functions = Functions{}; }

int fake_current_device() { return current_device; }

void fake_set_device(int index) { current_device = index; }

int64_t fake_current_stream(int device) { return current_streams[device]; }

void fake_set_stream(int device, int64_t id) { current_streams[device] = id; }

int fake_is_pinned(const void* address) { return is_pinned(address); }
}
