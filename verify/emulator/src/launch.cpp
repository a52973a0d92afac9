// launch.cpp: configuration, and a launch: all blocks of the grid, one after the other.
//
// Order of the blocks: ascending, descending, or shuffled by the seed, as Config::order says. A launch that finds
// something returns cudaErrorLaunchFailure, and so do all later ones until the record is forgotten.
#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>

#include "report.h"
#include "runtime.h"

namespace emu {

Config config;

namespace {

std::map<std::string, double> options;
std::map<const void*, int> allowed_shared_bytes;  // by kernel, from cudaFuncSetAttribute
constexpr int kAlwaysAllowed = 48 * 1024;
int last_code = 0;
uint64_t generator = 1;

void seed_generator(uint64_t seed) {
  generator = (seed + 1) * 0x9E3779B97F4A7C15ull;
  if (!generator) generator = 1;
}

bool can_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  const auto allowed = allowed_shared_bytes.find(kernel);
  const size_t most = allowed == allowed_shared_bytes.end() ? kAlwaysAllowed : max(allowed->second, kAlwaysAllowed);
  return threads > 0 && threads <= kMaxThreads && grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu &&
         grid.y <= 65535 && grid.z <= 65535 && shared_bytes <= most &&
         shared_bytes <= size_t(option("shared_bytes_max", kSharedLimit));
}

std::vector<uint64_t> block_order(uint64_t blocks) {
  std::vector<uint64_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  if (config.order == Order::descending) std::reverse(order.begin(), order.end());
  if (config.order == Order::random)
    for (uint64_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[random_bits() % i]);
  return order;
}

// False when there is no memory for the threads' stacks.
bool run_block(uint64_t block, dim3 grid, dim3 threads, Body body) {
  blockIdx = {unsigned(block % grid.x), unsigned(block / grid.x % grid.y), unsigned(block / grid.x / grid.y)};
  if (!start_threads(threads)) return false;
  for (int i = 0; i < topic_count; ++i)
    if (topics[i]->block_start) topics[i]->block_start();
  run_threads(body);
  for (int i = 0; i < topic_count && !stopped(); ++i)
    if (topics[i]->block_exit) topics[i]->block_exit();
  return true;
}

int run_grid(dim3 grid, dim3 threads, Body body) {
  for (int i = 0; i < topic_count; ++i)
    if (topics[i]->launch_start) topics[i]->launch_start();
  for (const uint64_t block : block_order(uint64_t(grid.x) * grid.y * grid.z)) {
    if (stopped()) break;
    if (!run_block(block, grid, threads, body)) return cudaErrorMemoryAllocation;
  }
  return finding_count() ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace

double option(const char* name, double otherwise) {
  const auto found = options.find(name);
  return found == options.end() ? otherwise : found->second;
}

uint32_t random_bits() {  // xorshift64
  generator ^= generator << 13;
  generator ^= generator >> 7;
  generator ^= generator << 17;
  return uint32_t(generator >> 16);
}

bool chance(unsigned one_in) { return random_bits() % one_in == 0; }

bool perform_now() { return config.timing == Timing::early || (config.timing == Timing::random && chance(2)); }

void allow_shared_bytes(const void* kernel, int bytes) { allowed_shared_bytes[kernel] = bytes; }

int last_launch_code() { return last_code; }

int launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, Body body) {
  if (stopped()) return last_code = cudaErrorLaunchFailure;
  if (!can_launch(kernel, grid, block, shared_bytes)) return last_code = cudaErrorInvalidValue;
  const auto start = std::chrono::steady_clock::now();
  gridDim = grid;
  blockDim = block;
  shared_size = uint32_t(shared_bytes);
  last_code = run_grid(grid, block, body);
  counters.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return last_code;
}

}  // namespace emu

extern "C" {

void emu_configure(int timing, int order, int check, int collect, uint64_t seed) {
  emu::config = {static_cast<emu::Timing>(timing), static_cast<emu::Order>(order), check != 0, collect != 0, seed};
  emu::seed_generator(seed);
  emu::last_code = 0;
  emu_reset();
}

void emu_option(const char* name, double value) { emu::options[name] = value; }
}
