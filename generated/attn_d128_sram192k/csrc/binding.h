// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// Templates: sha256 951af7d3558d2071
//
// What the two bindings share: the checks of the op's arguments, copies of layouts that a kernel cannot read, and the
// outputs. Written on torch's stable C ABI (torch/csrc/stable/), so that one build serves later versions of torch.
//
// Holds when `prepare` returns: every promise that forward.h makes to a kernel. A request that breaks a rule raises
// ValueError (std::invalid_argument) with the sentence that checks.py has for it: callers of torch.ops get here
// without passing through Python.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "forward.h"

namespace binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kD = 128;
constexpr int64_t kDv = 128;
// In the order of DType: torch's names, and those of plan.json.
constexpr const char* kDTypeNames[] = {"float32", "float64", "bfloat16", "float16"};
constexpr const char* kShortNames[] = {"float32", "float64", "bf16", "fp16"};

[[noreturn]] inline void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

inline std::string number(double x) {
  if (std::isnan(x)) return "nan";
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

inline std::string shape(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + (t.dim() == 1 ? ",)" : ")");
}

inline std::string device(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return "another device";
}

inline std::string dtype_name(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "another dtype";
  }
}

// The code of DType, or -1.
inline int dtype_code(const Tensor& t) {
  const std::string name = dtype_name(t);
  for (int code = 0; code < 4; ++code)
    if (name == kDTypeNames[code]) return code;
  return -1;
}

inline bool same_device(const Tensor& a, const Tensor& b) { return device(a) == device(b); }

inline void check_tensors(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4)
    refuse("q, k and v must have 4 dimensions (batch, heads, length, width); got q " + shape(q) + ", k " + shape(k) +
           ", v " + shape(v));
  if (q.scalar_type() != k.scalar_type() || q.scalar_type() != v.scalar_type())
    refuse("q, k and v must share one dtype; got q " + dtype_name(q) + ", k " + dtype_name(k) + ", v " +
           dtype_name(v) + " (autocast leaves float64 as it is: cast them)");
  if (!same_device(q, k) || !same_device(q, v))
    refuse("q, k and v must be on one device; got q on " + device(q) + ", k on " + device(k) + ", v on " + device(v));
  if (q.size(3) != kD || k.size(3) != kD)
    refuse("this package is made for d=" + std::to_string(kD) + "; q has d=" + std::to_string(q.size(3)) +
           " and k has d=" + std::to_string(k.size(3)));
  if (v.size(3) != kDv)
    refuse("this package is made for dv=" + std::to_string(kDv) + "; v has dv=" + std::to_string(v.size(3)));
  if (k.size(0) != v.size(0) || k.size(1) != v.size(1) || k.size(2) != v.size(2))
    refuse("k and v must agree in batch, heads and length; got k " + shape(k) + ", v " + shape(v));
  if (q.size(0) != k.size(0))
    refuse("q has batch " + std::to_string(q.size(0)) + ", k and v have batch " + std::to_string(k.size(0)));
  const int64_t Hq = q.size(1), Hkv = k.size(1);
  if (Hkv == 0 ? Hq != 0 : Hq % Hkv != 0)
    refuse("Hq=" + std::to_string(Hq) + " query heads cannot share Hkv=" + std::to_string(Hkv) +
           " key/value heads: Hq must be a multiple of Hkv");
}

// scale * log2(e) must be a finite normal number in the arithmetic of the kernel.
inline void check_scale(double scale, int dtype) {
  const double low = dtype == kFloat64 ? 0x1p-1022 : 0x1p-126, high = dtype == kFloat64 ? 0x1p1023 : 0x1p127;
  if (!(scale >= low && scale <= high))
    refuse("scale must be a number from " + number(low) + " to " + number(high) + "; got " + number(scale));
}

inline void check_causal(int64_t causal) {
  if (causal < kFull || causal > kTopLeft)
    refuse("causal must be 0 (none), 1 (bottom_right) or 2 (top_left); got " + std::to_string(causal));
}

inline void check_key_lengths(const Tensor& lengths, const Tensor& q) {
  if (lengths.scalar_type() != ScalarType::Int && lengths.scalar_type() != ScalarType::Long)
    refuse("key_lengths must be int32 or int64; got " + dtype_name(lengths));
  if (lengths.dim() != 1 || lengths.size(0) != q.size(0))
    refuse("key_lengths must have shape (" + std::to_string(q.size(0)) + ",), one length per batch entry; got " +
           shape(lengths));
  if (!same_device(lengths, q)) refuse("key_lengths must be on " + device(q) + " like q; it is on " + device(lengths));
}

// A contiguous copy at the start of its own allocation.
inline Tensor fresh_copy(const Tensor& t, ScalarType dtype) {
  Tensor copy = torch::stable::new_empty(t, t.sizes(), dtype);
  torch::stable::copy_(copy, t);
  return copy;
}

// Lengths as kernels read them: int64, in one piece.
inline Tensor contiguous_lengths(const Tensor& lengths) {
  const bool usable = lengths.scalar_type() == ScalarType::Long && lengths.is_contiguous();
  return usable ? lengths : fresh_copy(lengths, ScalarType::Long);
}

// Whether a kernel can read the layout: unit last stride and, if `alignment` (bytes) is not 0, 16-byte aligned rows.
inline bool is_readable(const Tensor& t, int64_t alignment) {
  if (t.numel() == 0) return true;
  if (t.stride(3) != 1) return false;
  if (alignment == 0) return true;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % alignment != 0) return false;
  const int64_t elements = alignment / static_cast<int64_t>(t.element_size());
  for (int64_t i = 0; i < 3; ++i)
    if (t.size(i) > 1 && t.stride(i) % elements != 0) return false;
  return true;
}

inline Tensor readable(const Tensor& t, int64_t alignment) {
  return is_readable(t, alignment) ? t : fresh_copy(t, t.scalar_type());
}

// Strides of (batch, head, row). The stride of a dimension of size 1 means nothing: the packed one stands in for it.
inline void set_strides(const Tensor& t, int64_t (&stride)[3]) {
  int64_t packed = t.size(3);
  for (int64_t i = 2; i >= 0; --i) {
    stride[i] = t.size(i) > 1 ? t.stride(i) : packed;
    packed *= t.size(i);
  }
}

// A call whose arguments are checked. The tensors keep alive what `args` points to.
struct Call {
  Tensor q, k, v, o, lse;
  std::optional<Tensor> key_lengths;
  int dtype;
  ForwardArgs args;
  bool is_empty;  // no row to compute: O and LSE have no element
};

// Check the request and make the outputs. alignment: 0, or the bytes to which a kernel needs rows aligned.
inline Call prepare(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& key_lengths,
                    double scale, int64_t causal, int64_t alignment) {
  Call call{readable(q, alignment), readable(k, alignment), readable(v, alignment), q, q, std::nullopt,
            dtype_code(q), {}, false};
  const int64_t B = q.size(0), Hq = q.size(1), Nq = q.size(2);
  const ScalarType wide = call.dtype == kFloat64 ? ScalarType::Double : ScalarType::Float;
  call.o = torch::stable::new_empty(q, {B, Hq, Nq, kDv}, q.scalar_type());
  call.lse = torch::stable::new_empty(q, {B, Hq, Nq}, wide);
  call.is_empty = call.lse.numel() == 0;
  if (key_lengths) call.key_lengths = contiguous_lengths(*key_lengths);

  ForwardArgs& args = call.args;
  args.q = call.q.const_data_ptr();
  args.k = call.k.const_data_ptr();
  args.v = call.v.const_data_ptr();
  args.o = call.o.mutable_data_ptr();
  args.lse = call.lse.mutable_data_ptr();
  args.B = B;
  args.Hq = Hq;
  args.Hkv = k.size(1);
  args.Nq = Nq;
  args.Nk = k.size(2);
  set_strides(call.q, args.q_stride);
  set_strides(call.k, args.k_stride);
  set_strides(call.v, args.v_stride);
  set_strides(call.o, args.o_stride);
  args.key_lengths = call.key_lengths ? static_cast<const int64_t*>(call.key_lengths->const_data_ptr()) : nullptr;
  args.scale = scale;
  args.causal = static_cast<int>(causal);
  return call;
}
}  // namespace binding
