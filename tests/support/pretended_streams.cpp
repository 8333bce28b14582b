// Streams of the pretended CUDA device, and races between them.
//
// Operations run at once, in the order of their launches. Each stream has a clock: how many operations of each stream
// have ended when it comes here. An event is a copy of a clock, and a stream that waits joins it to its own. The host
// has one clock for all its threads. Two uses of the same memory race if one writes, and the later one's stream does
// not know that the earlier one has ended.
//
// Freed memory goes at once to the next tensor of the stream on which it was allocated, of any size. So uses of freed
// memory that this stream does not know to have ended are uses of each new tensor of it. `record_stream` ends them.

#include "pretended_cuda.hpp"

#include <torch/csrc/profiler/combined_traceback.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>

namespace pretended {
namespace {

constexpr int64_t STREAMS = 512;  // then their numbers come again

struct Operation {
  std::string name;
  std::shared_ptr<torch::CapturedTraceback> lines;
};

struct Use {  // of memory, by an operation
  std::shared_ptr<Operation> by;
  int64_t stream;
  uint32_t tick;
  bool writes;
  const char *first, *end;
  std::vector<int64_t> sizes, strides;
  int64_t item;
  bool of_freed;  // memory that was freed since

  bool dense() const {
    int64_t count = 1;
    for (auto size : sizes) count *= size;
    return count * item >= end - first;
  }
};

struct Block {  // of memory that was allocated
  size_t bytes;
  int64_t stream;
  bool pinned, of_graph;
  int owners;
  std::set<int64_t> recorded;
  std::vector<Use> uses;
};

// Nothing of it ends before the process: tensors may be freed later than that.
auto& lock = *new std::mutex;  // nobody takes Python's lock inside it
auto& clocks = *new std::vector<Clock>(1);
auto& host_clock = *new Clock;
auto& blocks = *new std::map<const char*, Block>;
auto& ghosts = *new std::map<int64_t, std::vector<Use>>;  // uses of freed memory, by the stream that may get it
auto& unseen = *new std::string;
int64_t made = 0;
size_t pinned_blocks = 0;
thread_local int64_t current = 0;

uint32_t at_of(const Clock& clock, int64_t stream) { return stream < int64_t(clock.size()) ? clock[stream] : 0; }

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

Clock& clock_of(int64_t stream) {
  if (stream >= int64_t(clocks.size())) clocks.resize(stream + 1);
  join(clocks[stream], host_clock);
  return clocks[stream];
}

bool ended(const Use& use, const Clock& clock) { return at_of(clock, use.stream) >= use.tick; }

std::map<const char*, Block>::iterator block_at(const void* p) {
  auto after = blocks.upper_bound(static_cast<const char*>(p));
  if (after == blocks.begin()) return blocks.end();
  auto found = std::prev(after);
  return p < found->first + found->second.bytes ? found : blocks.end();
}

// ------------------------------------------------------------------------------- uses that overlap

void each_element(const Use& use, size_t dim, int64_t at, const std::function<void(int64_t)>& see) {
  if (dim == use.sizes.size()) return see(at);
  for (int64_t i = 0; i < use.sizes[dim]; ++i) each_element(use, dim + 1, at + i * use.strides[dim] * use.item, see);
}

bool overlap(const Use& a, const Use& b) {
  if (a.first >= b.end || b.first >= a.end) return false;
  if (a.dense() && b.dense()) return true;
  std::vector<bool> taken(a.end - a.first);
  each_element(a, 0, 0, [&](int64_t at) { std::fill_n(taken.begin() + at, a.item, true); });
  bool found = false;
  each_element(b, 0, b.first - a.first, [&](int64_t at) {
    for (int64_t byte = std::max<int64_t>(at, 0); byte < std::min<int64_t>(at + b.item, taken.size()); ++byte)
      found |= taken[byte];
  });
  return found;
}

bool covers(const Use& a, const Use& b) {
  bool same = a.first == b.first && a.item == b.item && a.sizes == b.sizes && a.strides == b.strides;
  return same || (a.dense() && a.first <= b.first && a.end >= b.end);
}

// ------------------------------------------------------------------------------- races

struct Race {
  Use before, now;
};

// Notes a use of a block, and forgets those that it makes needless. Returns a race, if there is one.
std::optional<Race> note(Block& block, const Use& use, const Clock& clock) {
  std::optional<Race> race;
  std::vector<Use> kept;
  for (auto& before : block.uses) {
    bool in_order = before.stream == use.stream || ended(before, clock);
    if (!in_order && (use.writes || before.writes) && overlap(before, use)) race = Race{before, use};
    bool needless = ended(before, host_clock) || (in_order && (use.writes || !before.writes) && covers(use, before));
    if (!needless) kept.push_back(std::move(before));
  }
  if (use.by && use.stream >= 0) kept.push_back(use);
  block.uses = std::move(kept);
  return race;
}

Use use_of(const at::Tensor& x, bool writes, std::shared_ptr<Operation> by, int64_t stream, uint32_t tick) {
  int64_t extent = 1;
  for (int64_t i = 0; i < x.dim(); ++i) extent += (x.size(i) - 1) * x.stride(i);
  auto first = static_cast<const char*>(x.const_data_ptr());
  int64_t item = x.element_size();
  return {by, stream, tick, writes, first, first + extent * item, x.sizes().vec(), x.strides().vec(), item, false};
}

std::string lines_of(const Operation& by) {
  if (!by.lines) return "";
  std::ostringstream text;
  auto found = torch::symbolize({by.lines.get()});
  int shown = 0;
  for (auto i : found.tracebacks.at(0)) {
    auto& frame = found.all_frames[i];
    bool runs = frame.filename.find("tests/support/pretended") != std::string::npos || frame.filename[0] == '<';
    if (!runs && shown++ < 12) text << "\n    " << frame.filename << ":" << frame.lineno << " " << frame.funcname;
  }
  return text.str();
}

std::string told(const Use& use) {
  std::ostringstream text;
  text << use.by->name << (use.writes ? " writes " : " reads ") << c10::IntArrayRef(use.sizes) << " on ";
  use.stream < 0 ? text << "the host" : text << "stream " << use.stream;
  return text.str();
}

std::string told(const Race& race) {
  std::ostringstream text;
  text << "race of streams: " << told(race.now) << ", and does not wait for: " << told(race.before)
       << (race.before.of_freed ? ", whose memory was freed since" : "") << "\n  now:" << lines_of(*race.now.by)
       << "\n  before:" << lines_of(*race.before.by);
  return text.str();
}

std::shared_ptr<Operation> operation(const std::string& name) {
  return std::make_shared<Operation>(Operation{name, torch::CapturedTraceback::gather(true, false, false)});
}

void say_later(const Race& race) {
  auto text = told(race);
  fprintf(stderr, "%s\n", text.c_str());
  std::lock_guard guard(lock);
  unseen += text + "\n";
}

}  // namespace

// ------------------------------------------------------------------------------- clocks

int64_t current_stream() { return current; }

int64_t exchange_stream(int64_t stream) { return std::exchange(current, stream); }

int64_t new_stream() {
  std::lock_guard guard(lock);
  return 1 + made++ % STREAMS;
}

Clock now(int64_t stream) {
  std::lock_guard guard(lock);
  return clock_of(stream);
}

void follows(int64_t stream, const Clock& done) {
  std::lock_guard guard(lock);
  join(clock_of(stream), done);
}

void host_follows(const Clock& done) {
  std::lock_guard guard(lock);
  join(host_clock, done);
}

Clock everything() {
  std::lock_guard guard(lock);
  Clock all;
  for (auto& clock : clocks) join(all, clock);
  return all;
}

// ------------------------------------------------------------------------------- operations

void launch(const std::string& name, int64_t stream, const std::vector<at::Tensor>& reads,
            const std::vector<at::Tensor>& writes) {
  if (captures) return;  // a replay runs it
  auto by = operation(name);
  std::optional<Race> race;
  {
    std::lock_guard guard(lock);
    auto& clock = clock_of(stream);
    if (stream >= int64_t(clock.size())) clock.resize(stream + 1);
    auto tick = ++clock[stream];
    auto see = [&](const at::Tensor& x, bool writing) {
      if (!x.defined() || !x.numel() || !x.has_storage()) return;
      auto block = block_at(x.const_data_ptr());
      if (block == blocks.end()) return;
      auto found = note(block->second, use_of(x, writing, by, stream, tick), clock);
      if (!race) race = found;
    };
    for (auto& x : writes) see(x, true);
    for (auto& x : reads) see(x, false);
  }
  if (race) say_later(*race);
  std::string found = races();
  TORCH_CHECK(found.empty(), found);
}

void host_uses(const std::string& name, const at::Tensor& x, bool writes) {
  if (!x.numel() || !x.has_storage()) return;
  std::optional<Race> race;
  {
    std::lock_guard guard(lock);
    auto block = block_at(x.const_data_ptr());
    if (block == blocks.end() || !block->second.pinned || block->second.uses.empty()) return;
    race = note(block->second, use_of(x, writes, nullptr, -1, 0), host_clock);
  }
  if (!race) return;
  race->now.by = operation(name);
  say_later(*race);
}

bool host_may_race() { return pinned_blocks; }

std::string races() {
  std::lock_guard guard(lock);
  return std::exchange(unseen, "");
}

// ------------------------------------------------------------------------------- memory

void allocated(const void* first, size_t bytes) {
  if (!bytes) return;
  std::lock_guard guard(lock);
  auto& block = blocks[static_cast<const char*>(first)];
  if (block.owners++) return;
  auto begin = static_cast<const char*>(first);
  block.bytes = bytes, block.stream = current, block.of_graph = captures;
  auto& left = ghosts[current];
  if (left.empty()) return;
  auto& clock = clock_of(current);
  std::erase_if(left, [&](const Use& use) { return ended(use, clock); });
  for (Use use : left) {
    use.first = begin, use.end = begin + bytes, use.item = 1, use.of_freed = true;
    use.sizes = {int64_t(bytes)}, use.strides = {1};
    block.uses.push_back(use);
  }
}

void freed(const void* first) {
  std::lock_guard guard(lock);
  auto found = blocks.find(static_cast<const char*>(first));
  if (found == blocks.end() || --found->second.owners) return;
  auto& block = found->second;
  if (!block.of_graph) {
    auto& clock = clock_of(block.stream);
    for (auto& use : block.uses) {
      bool done = use.stream == block.stream || use.of_freed || block.recorded.count(use.stream) || ended(use, clock);
      if (!done) ghosts[block.stream].push_back(use);
    }
  }
  blocks.erase(found);
}

void record_stream(const void* first, int64_t stream) {
  std::lock_guard guard(lock);
  auto block = block_at(first);
  if (block != blocks.end()) block->second.recorded.insert(stream);
}

void pin(const void* first, size_t bytes) {
  if (!bytes) return;
  std::lock_guard guard(lock);
  auto& block = blocks[static_cast<const char*>(first)];
  block = {bytes, -1, true, false, 1};
  ++pinned_blocks;
}

void unpin(const void* first, bool of_torch) {
  std::optional<Use> left;
  {
    std::lock_guard guard(lock);
    auto found = blocks.find(static_cast<const char*>(first));
    if (found == blocks.end()) return;
    for (auto& use : found->second.uses)
      if (!of_torch && !ended(use, host_clock)) left = use;  // PyTorch's own waits for its copies
    blocks.erase(found);
    --pinned_blocks;
  }
  if (!left) return;
  Use now{operation("cudaHostUnregister"), -1, 0, true};
  say_later({*left, now});
}

bool is_pinned(const void* p) {
  std::lock_guard guard(lock);
  auto block = block_at(p);
  return block != blocks.end() && block->second.pinned;
}

}  // namespace pretended
