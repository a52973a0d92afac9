// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// Templates: sha256 be9584977b246cf6
//
// The part of the backward op that both bindings share: the checks of its arguments and the gradients that it returns.
//
// Holds when `prepare_backward` returns: every promise that backward.h makes to a kernel. q, k, v, key_lengths, scale
// and causal obey the rules of the forward op; o, lse and their gradients must look like what that op returned.
#pragma once
#include <tuple>
#include <vector>

#include "backward.h"
#include "binding.h"

namespace binding {

inline std::string shape(const std::vector<int64_t>& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + ")";
}

inline void check_like(const char* name, const Tensor& t, const std::vector<int64_t>& sizes, const char* dtype,
                       const Tensor& q) {
  bool fits = t.dim() == static_cast<int64_t>(sizes.size()) && dtype_name(t) == dtype && same_device(t, q);
  for (int64_t i = 0; fits && i < t.dim(); ++i) fits = t.size(i) == sizes[i];
  if (!fits)
    refuse(std::string(name) + " must be " + dtype + " of shape " + shape(sizes) + " on " + device(q) +
           " for these q, k and v; got " + dtype_name(t) + " of shape " + shape(t) + " on " + device(t));
}

// After check_tensors.
inline void check_results(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& o,
                          const Tensor& lse, const std::vector<bool>& wanted) {
  const std::vector<int64_t> rows = {q.size(0), q.size(1), q.size(2)}, outputs = {rows[0], rows[1], rows[2], kDv};
  const std::string narrow = dtype_name(q);
  const char* wide = narrow == "float64" ? "float64" : "float32";
  check_like("dout", dout, outputs, narrow.c_str(), q);
  if (dlse) check_like("dlse", *dlse, rows, wide, q);
  check_like("o", o, outputs, narrow.c_str(), q);
  check_like("lse", lse, rows, wide, q);
  if (wanted.size() != 3) refuse("wanted must say for each of dq, dk, dv whether to compute it; got " +
                                 std::to_string(wanted.size()) + " values");
}

// A backward call whose arguments are checked. The tensors keep alive what `args` points to.
struct BackwardCall {
  Tensor q, k, v, o, lse, dout;
  std::optional<Tensor> dlse, key_lengths;
  Tensor dq, dk, dv;  // shape (0,) where not wanted
  int dtype;
  BackwardArgs args;
  bool is_done;  // no pair of a row and a key: the gradients are 0 already
};

inline void set_all_strides(const Tensor& t, int64_t* stride) {
  for (int64_t i = 0; i < t.dim(); ++i) stride[i] = t.stride(i);
}

// alignment: 0, or the bytes to which a kernel needs rows aligned; it then also needs rows of dO in one piece.
inline BackwardCall prepare_backward(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                                     const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                     const std::optional<Tensor>& key_lengths, double scale, int64_t causal,
                                     const std::vector<bool>& wanted, bool deterministic, int64_t alignment) {
  BackwardCall call{readable(q, alignment), readable(k, alignment), readable(v, alignment), readable(o, alignment),
                    lse, alignment ? readable(dout, alignment) : dout, dlse, std::nullopt,
                    q, q, q, dtype_code(q), {}, false};
  if (key_lengths) call.key_lengths = contiguous_lengths(*key_lengths);
  const ScalarType stored = q.scalar_type();
  const auto gradient = [&](const Tensor& t, bool is_wanted) {
    return is_wanted ? torch::stable::new_empty(t, t.sizes(), stored) : torch::stable::new_empty(t, {0}, stored);
  };
  call.dq = gradient(q, wanted[0]);
  call.dk = gradient(k, wanted[1]);
  call.dv = gradient(v, wanted[2]);

  BackwardArgs& args = call.args;
  args.q = call.q.const_data_ptr();
  args.k = call.k.const_data_ptr();
  args.v = call.v.const_data_ptr();
  args.o = call.o.const_data_ptr();
  args.lse = call.lse.const_data_ptr();
  args.dout = call.dout.const_data_ptr();
  args.dlse = call.dlse ? call.dlse->const_data_ptr() : nullptr;
  args.B = q.size(0);
  args.Hq = q.size(1);
  args.Hkv = k.size(1);
  args.Nq = q.size(2);
  args.Nk = k.size(2);
  set_strides(call.q, args.q_stride);
  set_strides(call.k, args.k_stride);
  set_strides(call.v, args.v_stride);
  set_strides(call.o, args.o_stride);
  set_all_strides(call.lse, args.lse_stride);
  int64_t of_rows[3];
  set_strides(call.dout, of_rows);
  for (int i = 0; i < 3; ++i) args.dout_stride[i] = of_rows[i];
  args.dout_stride[3] = call.dout.stride(3);
  if (call.dlse) set_all_strides(*call.dlse, args.dlse_stride);
  args.key_lengths = call.key_lengths ? static_cast<const int64_t*>(call.key_lengths->const_data_ptr()) : nullptr;
  args.scale = scale;
  args.causal = static_cast<int>(causal);
  args.deterministic = deterministic;

  call.is_done = q.numel() == 0 || k.numel() == 0;
  bool is_any = false;
  for (auto [t, pointer, stride] : {std::tuple{&call.dq, &args.dq, &args.dq_stride},
                                    std::tuple{&call.dk, &args.dk, &args.dk_stride},
                                    std::tuple{&call.dv, &args.dv, &args.dv_stride}}) {
    if (t->numel() == 0) continue;
    is_any = true;
    *pointer = t->mutable_data_ptr();
    set_strides(*t, *stride);
    if (call.is_done) torch::stable::fill_(*t, 0.);
  }
  call.is_done |= !is_any;
  return call;
}

}  // namespace binding
