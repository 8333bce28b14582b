// NCCL of the pretended CUDA device. gloo moves the data; streams and the lifetime of tensors are as in PyTorch's
// ProcessGroupNCCL (torch 2.11 to 2.14), or with `nccl2` as in that of torch 2.15.
//
// A communicator has a stream. What is asynchronous runs there, after what the current stream had until then, and else
// on the current stream. `wait` makes the current stream wait, and not the host. Until then the work keeps the tensors
// of collectives, and the storages of messages are recorded on the stream (with NCCL2 their tensors are kept too).
// A message outside of a group has a communicator and a stream for each peer, unless the group has a device.

#include "pretended_cuda.hpp"

#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <map>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {
using at::Tensor;
using namespace c10d;
using c10::intrusive_ptr, c10::make_intrusive;
using pretended::borrowed;
using Tensors = std::vector<Tensor>;
using Post = std::function<std::vector<intrusive_ptr<Work>>()>;

Tensors on_host(const Tensors& x) {
  Tensors to;
  for (auto& tensor : x) to.push_back(borrowed(tensor));
  return to;
}

// A work of gloo for each pair of tensors.
Post pairs(const Tensors& to, const Tensors& of, std::function<intrusive_ptr<Work>(Tensor&, Tensor&)> begin) {
  return [=] {
    std::vector<intrusive_ptr<Work>> parts;
    for (size_t i = 0; i < to.size(); ++i) {
      auto below = borrowed(to[i]), mine = borrowed(of[i]);
      parts.push_back(begin(below, mine));
    }
    return parts;
  };
}

void kept_until_it_ends(const Tensor& x, int64_t stream) {
  if (x.defined()) pretended::record_stream(x.storage().data(), stream);
}

// Works of gloo that nobody waits for. One that is destroyed earlier cancels its message.
void leave(const std::vector<intrusive_ptr<Work>>& works) {
  static auto& left = *new std::deque<intrusive_ptr<Work>>;
  static auto& lock = *new std::mutex;
  std::vector<intrusive_ptr<Work>> oldest;
  {
    std::lock_guard guard(lock);
    left.insert(left.end(), works.begin(), works.end());
    for (; left.size() > 100; left.pop_front()) oldest.push_back(left.front());
  }
  for (auto& work : oldest) work->wait();
}

struct NcclWork : Work {
  std::vector<intrusive_ptr<Work>> parts;  // of gloo
  Tensors kept, outputs;
  std::vector<std::function<void()>> last;
  int64_t stream = 0;
  pretended::Clock done;
  bool is_barrier = false;
  std::mutex once;

  ~NcclWork() override {  // the watchdog keeps the tensors until it ends
    for (auto& x : kept) kept_until_it_ends(x, stream);
    leave(parts);
  }

  void finish() {
    std::lock_guard guard(once);
    for (auto& part : parts) part->wait();
    parts.clear();
    for (auto& each : last) each();
    last.clear();
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    finish();
    pretended::follows(pretended::current_stream(), done);
    kept.clear();
    if (is_barrier || timeout != kNoTimeout) pretended::wait();
    return true;
  }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }

  bool isCompleted() override {
    for (auto& part : parts)
      if (!part->isCompleted()) return false;
    pretended::host_follows(done);
    return true;
  }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return outputs; }

  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    finish();
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, pretended::GPU, stream));
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{pretended::GPU});
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

struct NcclOptions : Backend::Options {
  NcclOptions() : Backend::Options("nccl") {}
  bool is_high_priority_stream = false;
  pybind11::handle config, split_from = pybind11::none();  // never freed: that takes Python's lock
  int64_t split_color = 0;
};

struct Operation {
  std::string name;
  Tensors reads, writes;
  Post post;
  bool async = true, message = false;
  int peer = -1;
  std::vector<std::function<void()>> last = {};
};

struct Nccl : Backend {
  intrusive_ptr<Backend> gloo;
  intrusive_ptr<NcclOptions> options;
  bool nccl2, connected = false, together = false;
  std::vector<Operation> group;
  intrusive_ptr<NcclWork> of_group;
  std::map<int, int64_t> streams;  // of the communicator (-1), and of those with a peer

  Nccl(intrusive_ptr<Backend> gloo, intrusive_ptr<NcclOptions> options, bool nccl2)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), options(options), nccl2(nccl2) {}

  const std::string getBackendName() const override { return "nccl"; }
  intrusive_ptr<Backend::Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(at::Device) override { connected = true; }
  void performNocolorSplit(at::Device) {}

  int64_t stream_of(const Operation& x) {
    bool apart = x.message && !together && !connected && !nccl2;
    auto [found, is_new] = streams.try_emplace(apart ? x.peer : -1, 0);
    if (is_new) found->second = pretended::new_stream();
    return found->second;
  }

  void begin(const Operation& x, NcclWork& work) {
    for (auto* tensors : {&x.reads, &x.writes})
      for (auto& tensor : *tensors) {
        TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense: ", x.name);
        bool packed = x.message ? tensor.is_non_overlapping_and_dense() : tensor.is_contiguous();
        TORCH_CHECK_VALUE(packed, "Tensors must be contiguous: ", x.name);
        if (!x.async) continue;
        if (x.message && !nccl2) kept_until_it_ends(tensor, work.stream);
        else work.kept.push_back(tensor);
      }
    if (x.async) pretended::follows(work.stream, pretended::now(pretended::current_stream()));
    for (auto& part : x.post()) work.parts.push_back(part);
    work.outputs.insert(work.outputs.end(), x.writes.begin(), x.writes.end());
    work.last.insert(work.last.end(), x.last.begin(), x.last.end());
  }

  intrusive_ptr<Work> run(Operation x) {
    auto work = together && of_group ? of_group : make_intrusive<NcclWork>();
    work->stream = x.async ? stream_of(x) : pretended::current_stream();
    if (together) {
      begin(x, *work);
      of_group = work;
      group.push_back(x);
      return x.message ? nullptr : work;
    }
    begin(x, *work);
    pretended::launch("nccl:" + x.name, work->stream, x.reads, x.writes);
    work->done = pretended::now(work->stream);
    if (x.async) return work;
    work->finish();
    return nullptr;
  }

  void startCoalescing() override { together = true; }

  intrusive_ptr<Work> endCoalescing() override {
    auto work = std::exchange(of_group, nullptr);
    auto operations = std::exchange(group, {});
    together = false;
    if (!work) return nullptr;
    bool async = operations.back().async;
    Tensors reads, writes;
    for (auto& x : operations) {
      reads.insert(reads.end(), x.reads.begin(), x.reads.end());
      writes.insert(writes.end(), x.writes.begin(), x.writes.end());
    }
    pretended::launch("nccl:group of " + operations[0].name, work->stream, reads, writes);
    work->done = pretended::now(work->stream);
    if (async) return work;
    work->finish();
    return nullptr;
  }

  // gloo has no mean.
  std::vector<std::function<void()>> mean(ReduceOp& op, const Tensors& of) {
    if (op != ReduceOp::AVG) return {};
    op = ReduceOp::SUM;
    return {[below = on_host(of), size = getSize()] {
      for (auto& x : below) x.div_(size);
    }};
  }

  intrusive_ptr<Work> broadcast(Tensors& x, const BroadcastOptions& how) override {
    auto reads = how.rootRank == getRank() ? x : Tensors();
    auto writes = how.rootRank == getRank() ? Tensors() : x;
    auto post = [=, this] {
      auto below = on_host(x);
      return std::vector{gloo->broadcast(below, how)};
    };
    return run({"broadcast", reads, writes, post, how.asyncOp});
  }

  intrusive_ptr<Work> allreduce(Tensors& x, const AllreduceOptions& given) override {
    auto how = given;
    auto last = mean(how.reduceOp, x);
    auto post = [=, this] {
      auto below = on_host(x);
      return std::vector{gloo->allreduce(below, how)};
    };
    return run({"all_reduce", {}, x, post, how.asyncOp, false, -1, last});
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& x, const AllreduceCoalescedOptions& given) override {
    AllreduceOptions how = given;
    auto last = mean(how.reduceOp, x);
    auto post = [=, this] {
      std::vector<intrusive_ptr<Work>> parts;
      for (auto& tensor : on_host(x)) {
        Tensors one{tensor};
        parts.push_back(gloo->allreduce(one, how));
      }
      return parts;
    };
    return run({"all_reduce_coalesced", {}, x, post, how.asyncOp, false, -1, last});
  }

  intrusive_ptr<Work> reduce(Tensors& x, const ReduceOptions& given) override {
    auto how = given;
    auto last = mean(how.reduceOp, x);
    auto post = [=, this] {
      auto below = on_host(x);
      return std::vector{gloo->reduce(below, how)};
    };
    bool root = how.rootRank == getRank();
    auto reads = root ? Tensors() : x, writes = root ? x : Tensors();
    return run({"reduce", reads, writes, post, how.asyncOp, false, -1, last});
  }

  intrusive_ptr<Work> allgather(std::vector<Tensors>& to, Tensors& of, const AllgatherOptions& how) override {
    auto post = [=, this] {
      std::vector<Tensors> below{on_host(to.at(0))};
      auto mine = on_host(of);
      return std::vector{gloo->allgather(below, mine, how)};
    };
    return run({"all_gather", of, to.at(0), post, how.asyncOp});
  }

  intrusive_ptr<Work> _allgather_base(Tensor& to, Tensor& of, const AllgatherOptions& how) override {
    Tensors tos{to}, ofs{of};
    return gather_into(tos, ofs, how);
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& to, Tensors& of, const AllgatherOptions& how) override {
    return gather_into(to, of, how);
  }

  intrusive_ptr<Work> gather_into(const Tensors& to, const Tensors& of, const AllgatherOptions& how) {
    auto post = pairs(to, of, [=, this](Tensor& below, Tensor& mine) { return gloo->_allgather_base(below, mine, how); });
    return run({"all_gather_into_tensor", of, to, post, how.asyncOp});
  }

  intrusive_ptr<Work> reduce_scatter(Tensors& to, std::vector<Tensors>& of, const ReduceScatterOptions& given) override {
    auto how = given;
    auto last = mean(how.reduceOp, to);
    auto post = [=, this] {
      auto below = on_host(to);
      std::vector<Tensors> parts{on_host(of.at(0))};
      return std::vector{gloo->reduce_scatter(below, parts, how)};
    };
    return run({"reduce_scatter", of.at(0), to, post, how.asyncOp, false, -1, last});
  }

  intrusive_ptr<Work> _reduce_scatter_base(Tensor& to, Tensor& of, const ReduceScatterOptions& how) override {
    Tensors tos{to}, ofs{of};
    return reduce_scatter_tensor_coalesced(tos, ofs, how);
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& to, Tensors& of, const ReduceScatterOptions& given) override {
    auto how = given;
    auto last = mean(how.reduceOp, to);
    auto post = pairs(to, of, [=, this](Tensor& below, Tensor& all) { return gloo->_reduce_scatter_base(below, all, how); });
    return run({"reduce_scatter_tensor", of, to, post, how.asyncOp, false, -1, last});
  }

  intrusive_ptr<Work> gather(std::vector<Tensors>& to, Tensors& of, const GatherOptions& how) override {
    auto post = [=, this] {
      std::vector<Tensors> below;
      for (auto& tensors : to) below.push_back(on_host(tensors));
      auto mine = on_host(of);
      return std::vector{gloo->gather(below, mine, how)};
    };
    return run({"gather", of, to.empty() ? Tensors() : to[0], post, how.asyncOp});
  }

  intrusive_ptr<Work> scatter(Tensors& to, std::vector<Tensors>& of, const ScatterOptions& how) override {
    auto post = [=, this] {
      std::vector<Tensors> parts;
      for (auto& tensors : of) parts.push_back(on_host(tensors));
      auto mine = on_host(to);
      return std::vector{gloo->scatter(mine, parts, how)};
    };
    return run({"scatter", of.empty() ? Tensors() : of[0], to, post, how.asyncOp});
  }

  intrusive_ptr<Work> alltoall_base(Tensor& to, Tensor& of, std::vector<int64_t>& rows_to, std::vector<int64_t>& rows_of,
                                    const AllToAllOptions& how) override {
    auto post = [=, this]() mutable {
      auto below = borrowed(to), mine = borrowed(of);
      return std::vector{gloo->alltoall_base(below, mine, rows_to, rows_of, how)};
    };
    return run({"all_to_all_single", {of}, {to}, post, how.asyncOp});
  }

  intrusive_ptr<Work> alltoall(Tensors& to, Tensors& of, const AllToAllOptions& how) override {
    auto post = [=, this] {
      std::vector<intrusive_ptr<Work>> parts;
      for (int peer = 0; peer < getSize(); ++peer) {
        Tensors mine{borrowed(of[peer])}, theirs{borrowed(to[peer])};
        if (peer == getRank()) {
          theirs[0].copy_(mine[0]);
        } else {
          parts.push_back(gloo->recv(theirs, peer, 1));
          parts.push_back(gloo->send(mine, peer, 1));
        }
      }
      return parts;
    };
    return run({"all_to_all", of, to, post, how.asyncOp});
  }

  intrusive_ptr<Work> send(Tensors& x, int to, int) override {
    auto post = [=, this] {
      auto below = on_host(x);
      return std::vector{gloo->send(below, to, 0)};
    };
    return run({"send", x, {}, post, true, true, to});
  }

  intrusive_ptr<Work> recv(Tensors& x, int from, int) override {
    auto post = [=, this] {
      auto below = on_host(x);
      return std::vector{gloo->recv(below, from, 0)};
    };
    return run({"recv", {}, x, post, true, true, from});
  }

  intrusive_ptr<Work> barrier(const BarrierOptions& how) override {
    auto post = [=, this] { return std::vector{gloo->barrier(how)}; };
    auto work = run({"barrier", {}, {}, post, true});
    static_cast<NcclWork*>(work.get())->is_barrier = true;
    return work;
  }
};

PYBIND11_MODULE(pretended_nccl, m) {
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");
  py::class_<NcclOptions, Backend::Options, intrusive_ptr<NcclOptions>>(m, "Options")
      .def(py::init([](bool high) {
             auto made = make_intrusive<NcclOptions>();
             made->is_high_priority_stream = high;
             made->config = py::module_::import("types").attr("SimpleNamespace")().release();
             return made;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_property("config", [](NcclOptions& x) { return x.config; },
                    [](NcclOptions& x, py::object given) { x.config = given.release(); })
      .def_property("split_from", [](NcclOptions& x) { return x.split_from; },
                    [](NcclOptions& x, py::object given) { x.split_from = given.release(); })
      .def_readwrite("split_color", &NcclOptions::split_color);
  py::class_<Nccl, Backend, intrusive_ptr<Nccl>>(m, "Nccl")
      .def(py::init<intrusive_ptr<Backend>, intrusive_ptr<NcclOptions>, bool>())
      .def_property_readonly("options", [](Nccl& x) { return x.options; })
      .def("perform_nocolor_split", &Nccl::performNocolorSplit);
}
}  // namespace
