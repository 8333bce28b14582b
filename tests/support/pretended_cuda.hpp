// What the parts of the pretended CUDA device share: `pretended_cuda.cpp`, `pretended_streams.cpp`, `pretended_nccl.cpp`.

#pragma once
#include <ATen/Tensor.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace pretended {

extern c10::Device GPU;  // of this process
extern bool captures;    // into a CUDA graph

at::Tensor host(const at::Tensor& x);      // its memory, as a tensor of the host
at::Tensor borrowed(const at::Tensor& x);  // the same, but the program frees it as if this tensor were not there
void wait();                               // the host waits for the current stream

// ------------------------------------------------------------------------------- streams

using Clock = std::vector<uint32_t>;  // of each stream, the number of operations that have ended

int64_t current_stream();  // of this thread
int64_t exchange_stream(int64_t stream);
int64_t new_stream();
Clock now(int64_t stream);                       // what has ended when the stream comes here
void follows(int64_t stream, const Clock& done);  // the stream waits
void host_follows(const Clock& done);            // the host waits
Clock everything();

// An operation on a stream. It throws if another stream, that it does not follow, may use the same memory meanwhile.
void launch(const std::string& name, int64_t stream, const std::vector<at::Tensor>& reads,
            const std::vector<at::Tensor>& writes);
void host_uses(const std::string& name, const at::Tensor& x, bool writes);
bool host_may_race();  // whether streams use pinned memory

void allocated(const void* first, size_t bytes);
void freed(const void* first);
void record_stream(const void* first, int64_t stream);
void pin(const void* first, size_t bytes);
void unpin(const void* first, bool of_torch);
bool is_pinned(const void* p);
std::string races();  // that nobody saw, because they were found where nothing can be thrown

}  // namespace pretended
