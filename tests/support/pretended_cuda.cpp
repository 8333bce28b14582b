// A CUDA device for a PyTorch without CUDA: its memory is the host's, and operators compute on the CPU.
// It refuses tensors of two devices, and warns of operators that the host waits for.

#include "pretended_cuda.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>

namespace pretended {
c10::Device GPU(c10::kCUDA, 0);
bool captures = false;
} // namespace pretended

namespace {
using at::IValue, at::Tensor;
using namespace c10;
using namespace pretended;

constexpr int COUNT = 8;
bool warns = false;

// ------------------------------------------------------------------------------- memory

// gloo may still use memory that the program has freed.
struct Borrowed {
  int users = 0;
  std::function<void()> end;
};
auto& borrowed_memory = *new std::map<const void*, Borrowed>;
auto& of_borrowed = *new std::mutex;

void end_memory(const void* p, std::function<void()> end) {
  freed(p);
  {
    std::lock_guard guard(of_borrowed);
    auto found = borrowed_memory.find(p);
    if (found != borrowed_memory.end()) return void(found->second.end = end);
  }
  end();
}

void give_back(void* p) {
  std::function<void()> end;
  {
    std::lock_guard guard(of_borrowed);
    auto found = borrowed_memory.find(p);
    if (--found->second.users) return;
    end = found->second.end;
    borrowed_memory.erase(found);
  }
  if (end) end();
}

void release_memory(void* p) {
  end_memory(p, [p] { free(p); });
}

struct Memory : Allocator {
  DataPtr allocate(size_t n) override {
    void* p = malloc(n ? n : 1);
    allocated(p, n);
    return {p, p, &release_memory, GPU};
  }
  DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void* to, const void* of, size_t n) const override { default_copy_data(to, of, n); }
};
Memory memory;

void release_pinned(void* p) {
  unpin(p, true);
  free(p);
}

struct PinnedMemory : Memory {
  DataPtr allocate(size_t n) override {
    void* p = malloc(n ? n : 1);
    pin(p, n);
    return {p, p, &release_pinned, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release_pinned; }
};
PinnedMemory pinned_memory;

// ------------------------------------------------------------------------------- what C++ asks

struct Recorded {  // what an event has
  Clock done;
  std::chrono::steady_clock::time_point at;
};

const Clock& done(void* event) { return static_cast<Recorded*>(event)->done; }
Stream numbered(int64_t stream) { return Stream(Stream::UNSAFE, GPU, stream); }

struct Guard : impl::NoOpDeviceGuardImpl<kCUDA> {
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  Stream getStream(Device) const noexcept override { return numbered(current_stream()); }
  Stream getDefaultStream(Device) const override { return numbered(0); }
  Stream getNewStream(Device, int) const override { return numbered(new_stream()); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return numbered(new_stream()); }
  Stream exchangeStream(Stream x) const noexcept override { return numbered(exchange_stream(x.id())); }
  bool isStreamCapturing(const Stream&) const override { return captures; }
  bool queryStream(const Stream& x) const override {
    synchronizeStream(x);
    return true;
  }
  void synchronizeStream(const Stream& x) const override { host_follows(now(x.id())); }
  void synchronizeDevice(const DeviceIndex) const override { host_follows(everything()); }
  void record(void** event, const Stream& x, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Recorded;
    *static_cast<Recorded*>(*event) = {now(x.id()), std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  void block(void* event, const Stream& x) const override {
    if (event) follows(x.id(), done(event));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_follows(done(event));
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    std::chrono::duration<double, std::milli> took =
        static_cast<Recorded*>(end)->at - static_cast<Recorded*>(begin)->at;
    return took.count();
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& x) const override {
    pretended::record_stream(data.get(), x.id());
  }
};
impl::DeviceGuardImplRegistrar guard(kCUDA, new Guard());

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return COUNT; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex current_device() const override { return GPU.index(); }
  DeviceIndex getCurrentDevice() const override { return GPU.index(); }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return GPU.index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return GPU.index(); }
  void setCurrentDevice(DeviceIndex) const override {}
  void deviceSynchronize(DeviceIndex) const override { host_follows(everything()); }
  Device getDeviceFromPtr(void*) const override { return GPU; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
};

// ------------------------------------------------------------------------------- the same memory on the other device

void release(void* storage) { delete static_cast<Storage*>(storage); }

void release_of_gpu(void* storage) {
  end_memory(static_cast<Storage*>(storage)->data(), [storage] { release(storage); });
}

Tensor place(const Tensor& x, Storage storage, DispatchKey key) {
  auto to = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), x.dtype());
  to.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return to;
}

Tensor seen_from(const Tensor& x, Device device) {
  auto* kept = new Storage(x.storage());
  if (device.is_cuda()) allocated(kept->data(), kept->nbytes());
  DataPtr data(kept->mutable_data(), kept, device.is_cuda() ? &release_of_gpu : &release, device);
  Allocator* allocator = device.is_cuda() ? &memory : GetAllocator(kCPU);
  Storage storage(Storage::use_byte_size_t(), kept->nbytes(), std::move(data), allocator, true);
  return place(x, std::move(storage), device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
}

Tensor device(const Tensor& x) { return seen_from(x, GPU); }
} // namespace

namespace pretended {
Tensor host(const Tensor& x) { return seen_from(x, Device(kCPU)); }

Tensor borrowed(const Tensor& x) {
  void* p = x.storage().mutable_data();
  if (!p) return host(x);
  {
    std::lock_guard guard(of_borrowed);
    ++borrowed_memory[p].users;
  }
  DataPtr data(p, p, &give_back, Device(kCPU));
  Storage storage(Storage::use_byte_size_t(), x.storage().nbytes(), std::move(data), GetAllocator(kCPU), false);
  return place(x, std::move(storage), DispatchKey::CPU);
}

void wait() {
  TORCH_CHECK(!captures, "operation not permitted when stream is capturing");
  if (warns) TORCH_WARN("called a synchronizing CUDA operation");
  host_follows(now(current_stream()));
}
} // namespace pretended

namespace {

// ------------------------------------------------------------------------------- operators

const std::set<std::string> WAITS = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};
const std::set<std::string> INDEX = {"aten::index", "aten::_index_put_impl_", "aten::_unsafe_index"};
const std::set<std::string> CUBLAS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::dot"};

void check(std::optional<Device> device) {
  bool ours = !device || !device->has_index() || *device == GPU;
  TORCH_CHECK(ours, "a tensor of ", *device, " in the process of ", GPU);
}

struct Call {
  std::vector<std::pair<Tensor, Tensor>> ours;  // of the device, and as the host sees it
  bool host_tensors = false, into_gpu = false, names_device = false;

  Tensor down(const Tensor& x) {
    if (!x.defined() || !x.is_cuda()) {
      host_tensors |= x.defined() && x.dim();
      return x;
    }
    ours.emplace_back(x, host(x));
    return ours.back().second;
  }

  IValue down(const IValue& x) {
    if (x.isTensor()) return down(x.toTensor());
    if (x.isDevice()) {
      names_device = true;
      if (x.toDevice().is_cuda()) check(x.toDevice());
      into_gpu = x.toDevice().is_cuda();
      return Device(kCPU);
    }
    if (!x.isList()) return x;
    auto list = x.toList();
    auto type = list.elementType();
    bool of_tensors = type->isSubtypeOf(*at::OptionalType::ofTensor());
    bool of_lists = type->kind() == at::ListType::Kind;
    if (!of_tensors && !of_lists) return x;
    impl::GenericList to(type);
    for (const IValue& item : x.toListRef()) to.push_back(down(item));
    return to;
  }

  Tensor up(const Tensor& x) {
    if (!x.defined() || !x.device().is_cpu()) return x;
    for (auto& [device, its_host] : ours) {
      if (x.is_same(its_host)) return device;
      if (x.has_storage() && x.storage().data() == its_host.storage().data() && x.storage().data())
        return place(x, device.storage(), DispatchKey::CUDA);
    }
    return into_gpu ? seen_from(x, GPU) : x;
  }

  IValue up(const IValue& x) {
    if (x.isTensor()) return up(x.toTensor());
    if (!x.isTensorList()) return x;
    List<Tensor> to;
    for (const Tensor& item : x.toTensorVector()) to.push_back(up(item));
    return to;
  }
};

void each_tensor(const IValue& x, std::vector<Tensor>& found) {
  if (x.isTensor() && x.toTensor().defined()) found.push_back(x.toTensor());
  if (x.isList())
    for (const IValue& item : x.toListRef()) each_tensor(item, found);
}

bool writes(const Argument& x) { return x.alias_info() && x.alias_info()->isWrite(); }

// A view has no operation: no values are read.
bool is_view(const FunctionSchema& schema) {
  for (auto& x : schema.returns())
    if (x.alias_info() && !writes(x)) return true;
  return false;
}

void compute(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  auto count = op.schema().arguments().size();
  Call call;
  std::vector<Tensor> read, written;
  auto first = stack->end() - count;
  for (size_t i = 0; i < count; ++i) each_tensor(first[i], writes(op.schema().arguments()[i]) ? written : read);
  for (auto x = first; x != stack->end(); ++x) *x = call.down(*x);
  bool on_gpu = !call.ours.empty();
  if (!call.names_device) call.into_gpu = on_gpu;
  if (on_gpu && call.host_tensors) {
    TORCH_CHECK(INDEX.count(name), "Expected all tensors to be on the same device, but found cuda:0 and cpu: ", name);
    wait();  // indices of the host
  }
  if (on_gpu && CUBLAS.count(name)) {
    bool refused = at::globalContext().deterministicAlgorithms();
    TORCH_CHECK(!refused, "Deterministic behavior was enabled, but this operation uses CuBLAS: ", name);
  }
  std::vector<std::vector<int64_t>> sizes;
  for (auto& [x, its_host] : call.ours) sizes.push_back(its_host.sizes().vec());
  op.callBoxed(stack);
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto& [x, its_host] = call.ours[i];
    if (its_host.sizes() != IntArrayRef(sizes[i])) at::native::set_tensor_(x, seen_from(its_host, GPU));  // an `out`
  }
  for (auto x = stack->end() - op.schema().returns().size(); x != stack->end(); ++x) {
    *x = call.up(*x);
    each_tensor(*x, written);
  }
  if (!is_view(op.schema())) launch(name, current_stream(), read, written);
  if (on_gpu && WAITS.count(name)) wait();
}

Tensor& copy(Tensor& to, const Tensor& of, bool non_blocking) {
  bool crosses = to.is_cuda() != of.is_cuda() && of.numel();
  bool waits = crosses && !(non_blocking && (to.is_cuda() ? of : to).is_pinned());
  launch("aten::copy_", current_stream(), {of}, {to});
  if (waits) wait();
  at::RecordFunctionGuard unseen(false);  // it is no operator of the host
  host(to).copy_(host(of));
  return to;
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  check(device);
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  check(device);
  DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, dtype_or_default(dtype));
}

Tensor& empty_set(Tensor& x) {
  Tensor none = at::detail::empty_generic({0}, &memory, DispatchKeySet(DispatchKey::CUDA), x.scalar_type(), {});
  return at::native::set_tensor_(x, none);
}

Tensor& set_storage(Tensor& x, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(x, std::move(source), offset, size, stride);
}

void record(Tensor& x, Stream stream) { pretended::record_stream(x.storage().data(), stream.id()); }

void pinned_or_not(int64_t address, int64_t bytes) {
  auto first = reinterpret_cast<const void*>(address);
  bytes ? pin(first, bytes) : unpin(first, false);
}

void launched(std::string name, at::TensorList reads, at::TensorList writes) {
  launch(name, current_stream(), reads.vec(), writes.vec());
}

// Operators of the host that use pinned memory.
std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
  auto name = host_may_race() ? function.operator_name() : std::nullopt;
  auto op = name ? Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op || is_view(op->schema())) return nullptr;
  if (!op->hasKernelForDispatchKey(DispatchKey::CPU) && name->name != "aten::copy_") return nullptr;
  auto inputs = function.inputs();
  std::vector<Tensor> read, written;
  for (size_t i = 0; i < inputs.size() && i < op->schema().arguments().size(); ++i)
    each_tensor(inputs[i], writes(op->schema().arguments()[i]) ? written : read);
  for (auto* tensors : {&read, &written})
    for (auto& x : *tensors)
      if (!x.device().is_cpu()) return nullptr;
  for (auto& x : written) host_uses(name->name, x, true);
  for (auto& x : read) host_uses(name->name, x, false);
  return nullptr;
}
const auto watching = at::addGlobalCallback(at::RecordFunctionCallback(&seen).needsInputs(true));

void resize_storage(const Tensor& x, int64_t bytes) {
  at::native::resize_bytes_cpu(x.storage().unsafeGetStorageImpl(), bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", at::native::resize_);
  m.impl("set_", empty_set);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", record);
}

TORCH_LIBRARY(pretended, m) {
  m.def("host(Tensor(a) x) -> Tensor(a)");
  m.def("device(Tensor(a) x) -> Tensor(a)");
  m.def("resize_storage(Tensor x, int bytes) -> ()");
  m.def("warn(bool on) -> ()", [](bool on) { warns = on; });
  m.def("pin(int address, int bytes) -> ()", pinned_or_not);
  m.def("launch(str name, Tensor[] reads, Tensor[] writes) -> ()", launched);
  m.def("host_reads(Tensor x) -> ()", [](const Tensor& x) { host_uses("host", x, false); });
  m.def("races() -> str", races);
  m.def("set_stream(int stream) -> int", exchange_stream);
  m.def("current_stream() -> int", current_stream);
  m.def("synchronize() -> ()", []() { host_follows(everything()); });
  m.def("capture(bool on) -> ()", [](bool on) { captures = on; });
  m.def("set_device(int index) -> ()", [](int64_t index) { GPU.set_index(index); });
}
TORCH_LIBRARY_IMPL(pretended, CUDA, m) {
  m.impl("host", host);
  m.impl("resize_storage", resize_storage);
}
TORCH_LIBRARY_IMPL(pretended, CPU, m) { m.impl("device", device); }
} // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
