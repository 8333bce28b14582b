// A CUDA device for a PyTorch without CUDA: its memory is the host's, and operators compute on the CPU.
// It refuses tensors of two devices, and warns of operators that the host waits for.

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
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace {
using at::IValue, at::Tensor;
using namespace c10;

constexpr int COUNT = 8;
Device GPU(kCUDA, 0);  // of this process
bool warns = false;

bool captures = false;  // into a CUDA graph

void wait() {
  TORCH_CHECK(!captures, "operation not permitted when stream is capturing");
  if (warns) TORCH_WARN("called a synchronizing CUDA operation");
}

// ------------------------------------------------------------------------------- memory

struct Memory : Allocator {
  DataPtr allocate(size_t n) override {
    void* p = malloc(n ? n : 1);
    return {p, p, &free, GPU};
  }
  DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* of, size_t n) const override { default_copy_data(to, of, n); }
};
Memory memory;

std::map<const void*, size_t> pinned;  // pinned memory: addresses and bytes
std::mutex of_pinned;

void unpin(void* p) {
  std::lock_guard lock(of_pinned);
  pinned.erase(p);
  free(p);
}

struct PinnedMemory : Memory {
  DataPtr allocate(size_t n) override {
    void* p = malloc(n ? n : 1);
    std::lock_guard lock(of_pinned);
    pinned[p] = n;
    return {p, p, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
};
PinnedMemory pinned_memory;

// ------------------------------------------------------------------------------- what C++ asks

struct Guard : impl::NoOpDeviceGuardImpl<kCUDA> {
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, GPU); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, GPU); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
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
  void deviceSynchronize(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return GPU; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard lock(of_pinned);
    auto after = pinned.upper_bound(p);
    if (after == pinned.begin()) return false;
    auto [first, bytes] = *std::prev(after);
    return p < static_cast<const char*>(first) + bytes;
  }
};

// ------------------------------------------------------------------------------- the same memory on the other device

void release(void* storage) { delete static_cast<Storage*>(storage); }

Tensor place(const Tensor& x, Storage storage, DispatchKey key) {
  auto to = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), x.dtype());
  to.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return to;
}

Tensor seen_from(const Tensor& x, Device device) {
  auto* kept = new Storage(x.storage());
  DataPtr data(kept->mutable_data(), kept, &release, device);
  Allocator* allocator = device.is_cuda() ? &memory : GetAllocator(kCPU);
  Storage storage(Storage::use_byte_size_t(), kept->nbytes(), std::move(data), allocator, true);
  return place(x, std::move(storage), device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
}

Tensor host(const Tensor& x) { return seen_from(x, Device(kCPU)); }
Tensor device(const Tensor& x) { return seen_from(x, GPU); }

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

void compute(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  auto count = op.schema().arguments().size();
  Call call;
  auto first = stack->end() - count;
  for (auto x = first; x != stack->end(); ++x) *x = call.down(*x);
  bool on_gpu = !call.ours.empty();
  if (!call.names_device) call.into_gpu = on_gpu;
  bool collective = name.rfind("c10d::", 0) == 0;
  if (on_gpu && call.host_tensors && !collective) {
    TORCH_CHECK(INDEX.count(name), "Expected all tensors to be on the same device, but found cuda:0 and cpu: ", name);
    wait();  // indices of the host
  }
  if (on_gpu && WAITS.count(name)) wait();
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
  for (auto x = stack->end() - op.schema().returns().size(); x != stack->end(); ++x) *x = call.up(*x);
}

Tensor& copy(Tensor& to, const Tensor& of, bool non_blocking) {
  bool crosses = to.is_cuda() != of.is_cuda() && of.numel();
  if (crosses && !(non_blocking && (to.is_cuda() ? of : to).is_pinned())) wait();
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

void record_stream(Tensor&, Stream) {}

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
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name : {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
                    "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                    "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_",
                    "scatter_", "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY(pretended, m) {
  m.def("host(Tensor(a) x) -> Tensor(a)");
  m.def("device(Tensor(a) x) -> Tensor(a)");
  m.def("resize_storage(Tensor x, int bytes) -> ()");
  m.def("warn(bool on) -> ()", [](bool on) { warns = on; });
  m.def("pin(int address, int bytes) -> ()", [](int64_t address, int64_t bytes) {
    std::lock_guard lock(of_pinned);
    bytes ? void(pinned[reinterpret_cast<void*>(address)] = bytes) : void(pinned.erase(reinterpret_cast<void*>(address)));
  });
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
