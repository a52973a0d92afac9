// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// Templates: sha256 b654ea2e8e03349e
//
// The ops on CPU tensors: picks the best instruction set that this machine has (or the one that TILEPROOF_CPU_ISA
// names, read at every call) and runs its kernel on torch's own threads.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "binding.h"
#include "binding_backward.h"

extern "C" {
const ForwardKernel* attention_forward_v4(int dtype);
const ForwardKernel* attention_forward_v3(int dtype);
const ForwardKernel* attention_forward_baseline(int dtype);
const ForwardKernel* attention_forward_amx(int dtype);
const BackwardKernel* attention_backward_v4(int dtype);
const BackwardKernel* attention_backward_v3(int dtype);
const BackwardKernel* attention_backward_baseline(int dtype);
const BackwardKernel* attention_backward_amx(int dtype);
}

namespace {

using binding::Call;
using torch::stable::Tensor;

#if defined(__x86_64__)
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
         __builtin_cpu_supports("movbe");
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

// The kernel saves the tile registers only of a process that asked: ARCH_REQ_XCOMP_PERM, feature 18 (tile data).
bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

bool has_amx() {
  return has_v4() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-bf16") && may_use_tiles();
}
#endif

struct Unit {
  const char* isa;
  bool is_present;
  const ForwardKernel* (*kernel)(int dtype);
  const BackwardKernel* (*backward)(int dtype);  // null: this instruction set has none
};

// Best first. Filled once: asking the machine, and the permission for tiles, takes system calls.
const Unit* begin_units() {
  static const Unit units[] = {
#if defined(__x86_64__)
      {"amx", has_amx(), attention_forward_amx, attention_backward_amx},
      {"v4", has_v4(), attention_forward_v4, attention_backward_v4},
      {"v3", has_v3(), attention_forward_v3, attention_backward_v3},
#endif
      {"baseline", true, attention_forward_baseline, attention_backward_baseline},
      {},
  };
  return units;
}

// The names, separated by ", ", of the units that this machine can run and that have a kernel for `dtype`.
std::string usable_isas(int dtype) {
  std::string text;
  for (const Unit* unit = begin_units(); unit->isa; ++unit)
    if (unit->is_present && unit->kernel(dtype)) text += (text.empty() ? "" : ", ") + std::string(unit->isa);
  return text;
}

// The unit that a call with this dtype runs. Raises ValueError when there is none.
const Unit& choose(int dtype, const std::string& dtype_name) {
  const char* forced = std::getenv("TILEPROOF_CPU_ISA");
  const bool is_forced = forced != nullptr && *forced != '\0';
  for (const Unit* unit = begin_units(); unit->isa; ++unit) {
    if (is_forced && std::strcmp(forced, unit->isa) != 0) continue;
    if (unit->is_present && dtype >= 0 && unit->kernel(dtype)) return *unit;
  }
  std::string dtypes;
  for (int code = 0; code < 4; ++code)
    if (!usable_isas(code).empty()) dtypes += (dtypes.empty() ? "" : ", ") + std::string(binding::kDTypeNames[code]);
  if (dtype < 0 || usable_isas(dtype).empty())
    binding::refuse("this package has no cpu kernel for " + dtype_name + "; it has " + dtypes);
  binding::refuse("TILEPROOF_CPU_ISA=" + std::string(forced) + ": not an instruction set of this machine with a " +
                  dtype_name + " kernel; there are " + usable_isas(dtype));
}

// The unit whose backward kernel belongs to a forward pass by `unit`: itself, or the next best one that has a kernel.
const Unit& backward_unit(const Unit& unit, int dtype) {
  for (const Unit* other = &unit; other->isa; ++other)
    if (other->is_present && other->backward && other->backward(dtype)) return *other;
  binding::refuse("this package has no backward cpu kernel for " + std::string(binding::kDTypeNames[dtype]));
}

// Lengths are in host memory, so a wrong one is an error at the call.
template <class Args>
void check_length_values(const Args& args) {
  for (int64_t b = 0; args.key_lengths && b < args.B; ++b)
    if (args.key_lengths[b] < 0 || args.key_lengths[b] > args.Nk)
      binding::refuse("key_lengths[" + std::to_string(b) + "] is " + std::to_string(args.key_lengths[b]) +
                      "; k and v have " + std::to_string(args.Nk) + " keys");
}

// Memory that the workers of one call share. The last block is kept for the next call, because the page faults of a
// fresh one took up to a third of a short call (bf16, 8 heads, N = 512, d = 128). A call that finds the slot empty,
// because another thread is in the kernel, takes a block of its own.
class SharedMemory {
 public:
  explicit SharedMemory(int64_t bytes) {
    if (bytes == 0) return;
    block_ = __atomic_exchange_n(&kept, nullptr, __ATOMIC_ACQ_REL);
    if (block_ && block_->bytes >= bytes) return;
    std::free(block_);
    const int64_t whole = (bytes + kPage - 1) / kPage * kPage;
    block_ = static_cast<Block*>(std::aligned_alloc(kPage, kPage + whole));
    if (!block_) throw std::bad_alloc();
    block_->bytes = whole;
  }
  ~SharedMemory() {
    if (block_ && block_->bytes <= kMostKept) block_ = __atomic_exchange_n(&kept, block_, __ATOMIC_ACQ_REL);
    std::free(block_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  void* get() const { return block_ ? reinterpret_cast<char*>(block_) + kPage : nullptr; }

 private:
  struct Block {  // the first page of the allocation; the memory starts on the second
    int64_t bytes;
  };
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kMostKept = 64 << 20;
  static Block* kept;
  Block* block_ = nullptr;
};
SharedMemory::Block* SharedMemory::kept = nullptr;

// Starting torch's threads takes about 5 microseconds: as long as this many multiply-adds take on one of them.
constexpr int64_t kNotWorthThreads = 1 << 16;

template <class Args>
bool is_small(const Args& args) {
  double work = binding::kD + binding::kDv;
  for (const int64_t size : {args.B, args.Hq, args.Nq, args.Nk}) work *= static_cast<double>(size);
  return work < kNotWorthThreads;
}

template <typename Work>
void on_threads(int64_t threads, const Work& work) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(); });
}

void require_success(int status) {
  if (status == ENOMEM) throw std::bad_alloc();
  if (status != 0) throw std::runtime_error("the attention kernel failed with error " + std::to_string(status));
}

// One pass of all workers over what they claim from a counter; `work` returns an error number.
template <typename Work>
void share_out(int64_t threads, const Work& work) {
  int64_t next = 0;
  int status = 0;
  on_threads(threads, [&] {
    if (const int error = work(&next)) __atomic_store_n(&status, error, __ATOMIC_RELAXED);
  });
  require_success(status);
}

void run(const ForwardKernel& kernel, const ForwardArgs& args) {
  const int64_t threads = is_small(args) ? 1 : torch::stable::get_num_threads();
  const SharedMemory shared(kernel.shared_bytes ? kernel.shared_bytes(&args) : 0);
  if (kernel.prepare)
    share_out(threads, [&](int64_t* next) { return kernel.prepare(&args, shared.get(), next), 0; });
  share_out(threads, [&](int64_t* next) { return kernel.run(&args, shared.get(), next); });
}

void run(const BackwardKernel& kernel, const BackwardArgs& args) {
  const int64_t threads = is_small(args) ? 1 : torch::stable::get_num_threads();
  const SharedMemory shared(kernel.shared_bytes(&args));
  kernel.begin(&args, shared.get());
  share_out(threads, [&](int64_t* next) { return kernel.run(&args, shared.get(), next); });
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& key_lengths,
                  double scale, int64_t causal) {
  binding::check_tensors(q, k, v);
  const int dtype = binding::dtype_code(q);
  choose(dtype, binding::dtype_name(q));
  binding::check_scale(scale, dtype);
  binding::check_causal(causal);
  if (key_lengths) binding::check_key_lengths(*key_lengths, q);
}

Call checked(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& key_lengths,
             double scale, int64_t causal) {
  check_inputs(q, k, v, key_lengths, scale, causal);
  Call call = binding::prepare(q, k, v, key_lengths, scale, causal, 0);
  check_length_values(call.args);
  return call;
}

void compute(const Call& call) {
  if (!call.is_empty) run(*choose(call.dtype, binding::dtype_name(call.q)).kernel(call.dtype), call.args);
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const std::optional<Tensor>& key_lengths, double scale, int64_t causal,
                                   std::optional<bool> /* of the backward pass */) {
  const Call call = checked(q, k, v, key_lengths, scale, causal);
  compute(call);
  return {call.o, call.lse};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                                            const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                            const std::optional<Tensor>& key_lengths, double scale, int64_t causal,
                                            const std::vector<bool>& wanted, bool deterministic) {
  check_inputs(q, k, v, key_lengths, scale, causal);
  binding::check_results(dout, dlse, q, o, lse, wanted);
  const binding::BackwardCall call = binding::prepare_backward(dout, dlse, q, k, v, o, lse, key_lengths, scale, causal,
                                                               wanted, deterministic, 0);
  check_length_values(call.args);
  if (!call.is_done) {
    const Unit& unit = backward_unit(choose(call.dtype, binding::dtype_name(q)), call.dtype);
    run(*unit.backward(call.dtype), call.args);
  }
  return {call.dq, call.dk, call.dv};
}

int write(const std::string& text, char* out, int capacity) {
  std::snprintf(out, capacity, "%s", text.c_str());
  return 0;
}

}  // namespace

// For op.py, through ctypes. All write text of at most `capacity` bytes.
// The instruction set that a call would run: returns 0 and writes its name, or 1 and writes why there is none.
extern "C" __attribute__((visibility("default"))) int attention_isa(int dtype, char* out, int capacity) {
  try {
    return write(choose(dtype, binding::kDTypeNames[dtype]).isa, out, capacity);
  } catch (const std::exception& error) {
    write(error.what(), out, capacity);
    return 1;
  }
}

// Likewise for a backward call.
extern "C" __attribute__((visibility("default"))) int attention_backward_isa(int dtype, char* out, int capacity) {
  try {
    return write(backward_unit(choose(dtype, binding::kDTypeNames[dtype]), dtype).isa, out, capacity);
  } catch (const std::exception& error) {
    write(error.what(), out, capacity);
    return 1;
  }
}

// The instruction sets that TILEPROOF_CPU_ISA may name for this dtype, best first, separated by ", ".
extern "C" __attribute__((visibility("default"))) int attention_isas(int dtype, char* out, int capacity) {
  return write(usable_isas(dtype), out, capacity);
}

STABLE_TORCH_LIBRARY_IMPL(TILEPROOF_NAMESPACE, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
