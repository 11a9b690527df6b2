// Substitutes: what runs in place of torch's CPU kernels that other devices' kernels differ from.
//
// Some operators have kernels on other devices only, which the autograd of common modules needs.
// Others take or return other types or shapes there, and autograd gives back to one kernel what
// another returned. Random ones that take no generator draw from the default one on the CPU, which
// is the host's.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>
#include <vector>

#include "operands.h"

namespace sim {

using c10::OperatorHandle;
using torch::jit::Stack;

// Replaces an operator's arguments, the whole stack, by its results.
using Substitute = void (*)(const OperatorHandle& op, Stack& stack);

inline bool is_defined(const IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

inline bool has_16_bits(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

inline bool is_integer(const Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), true);
}

// ---- other types --------------------------------------------------------------------------------

// For operators that other devices have for more types than the CPU. Results are in the wider type,
// and are rounded when they are copied to where they belong.
template <bool is_narrow(const Tensor&), at::ScalarType wide>
void widened(const OperatorHandle& op, Stack& stack) {
  for (IValue& argument : stack)
    if (is_defined(argument) && is_narrow(argument.toTensor()))
      argument = argument.toTensor().to(wide);
  op.callBoxed(&stack);
}

// ---- norms --------------------------------------------------------------------------------------

// Layer and group norm on other devices keep statistics in float32 where inputs have 16 bits; the
// CPU's backward kernels expect them in the type of the inputs.
template <size_t mean, size_t weight>
void norm_backward(const OperatorHandle& op, Stack& stack) {
  auto dtype = stack[1].toTensor().scalar_type();
  if (is_defined(stack[weight]))
    dtype = c10::promoteTypes(dtype, stack[weight].toTensor().scalar_type());
  for (size_t i : {mean, mean + 1}) stack[i] = stack[i].toTensor().to(dtype);
  op.callBoxed(&stack);
}

// Batch norm on other devices takes weights, running and saved statistics in float32 or in the
// inputs' 16 bits, each as it is; on the CPU they must all be of one type.
inline void to_float32(Stack& stack, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i++)
    if (is_defined(stack[i])) stack[i] = stack[i].toTensor().to(at::kFloat);
}

// In evaluation, the CPU's kernel saves no statistics; others save those that they used.
inline void batch_norm(const OperatorHandle& op, Stack& stack) {
  constexpr size_t kWeight = 1, kMean = 3, kVariance = 4, kEnd = 5;
  const Stack given = stack;
  const bool is_training = given[5].toBool();
  const double epsilon = given[7].toDouble();
  if (has_16_bits(given[0].toTensor())) to_float32(stack, kWeight, kEnd);
  const Stack used = stack;
  op.callBoxed(&stack);
  if (!is_training) {
    stack[1] = used[kMean].toTensor().clone();
    stack[2] = (used[kVariance].toTensor() + epsilon).rsqrt();
    return;
  }
  for (size_t i : {kMean, kVariance})
    if (is_defined(given[i]) && !given[i].toTensor().is_same(used[i].toTensor()))
      given[i].toTensor().copy_(used[i].toTensor());
}

inline void batch_norm_backward(const OperatorHandle& op, Stack& stack) {
  constexpr size_t kWeight = 2, kEnd = 7;
  if (has_16_bits(stack[1].toTensor())) to_float32(stack, kWeight, kEnd);
  op.callBoxed(&stack);
}

// ---- random numbers -----------------------------------------------------------------------------

// Arguments: the input, the share to drop, whether this is training (a bool or None), and after
// those of the operator a generator. Returns the output and the mask of what is kept.
inline void native_dropout(const OperatorHandle&, Stack& stack) {
  const Tensor input = stack[0].toTensor();
  const bool is_training = stack[2].isNone() || stack[2].toBool();
  const double kept = is_training ? 1 - stack[1].toDouble() : 1;
  Tensor mask = at::ones(input.sizes(), input.options().dtype(at::kBool));
  if (is_training) mask.bernoulli_(kept, stack[3].toGenerator());
  stack = {input * mask * (kept > 0 ? 1 / kept : 0), mask};
}

// ---- recurrent cells, which only other devices fuse ---------------------------------------------

// Returns the type in which other devices compute.
inline at::ScalarType wide_type(const Tensor& tensor) {
  return has_16_bits(tensor) ? at::kFloat : tensor.scalar_type();
}

// Returns the parts of a cell's gates, in the type to compute in.
inline std::vector<Tensor> gates_of(const Tensor& tensor, int64_t num_gates) {
  return tensor.to(wide_type(tensor)).chunk(num_gates, 1);
}

inline Tensor with_bias(const Tensor& gates, const IValue& bias) {
  Tensor wide = gates.to(wide_type(gates));
  return is_defined(bias) ? wide + bias.toTensor() : wide;
}

inline Tensor or_zeros(const IValue& gradient, const Tensor& like) {
  return is_defined(gradient) ? gradient.toTensor().to(like.dtype()) : at::zeros_like(like);
}

// Arguments: the gates of input and hidden state, the cell's state, two biases. Returns hidden
// state, cell's state, and the gates for the backward.
inline void lstm_cell(const OperatorHandle&, Stack& stack) {
  Tensor input = stack[0].toTensor(), state = stack[2].toTensor();
  Tensor gates = with_bias(input, stack[3]) + with_bias(stack[1].toTensor(), stack[4]);
  std::vector<Tensor> parts = gates.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid();
  Tensor cell = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor new_state = forget * state.to(gates.dtype()) + in * cell;
  Tensor hidden = out * new_state.tanh();
  Tensor saved = at::cat({in, forget, cell, out}, 1);
  stack = {hidden.to(state.dtype()), new_state.to(state.dtype()), saved.to(input.dtype())};
}

// Arguments: gradients of hidden and cell's state, the cell's states before and after, the gates.
// Returns gradients of the gates, of the state, and of each bias.
inline void lstm_cell_backward(const OperatorHandle&, Stack& stack) {
  if (!is_defined(stack[0]) && !is_defined(stack[1])) {
    stack = {Tensor(), Tensor(), Tensor()};
    return;
  }
  const Tensor before = stack[2].toTensor(), saved = stack[4].toTensor();
  const bool has_bias = stack[5].toBool();
  std::vector<Tensor> gates = gates_of(saved, 4);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  Tensor after = stack[3].toTensor().to(in.dtype()).tanh();
  Tensor of_hidden = or_zeros(stack[0], after);
  Tensor of_state = of_hidden * out * (1 - after * after) + or_zeros(stack[1], after);
  Tensor of_gates = at::cat({of_state * cell * (1 - in) * in,
                             of_state * before.to(in.dtype()) * (1 - forget) * forget,
                             of_state * in * (1 - cell * cell),
                             of_hidden * after * (1 - out) * out},
                            1).to(saved.dtype());
  Tensor of_bias = has_bias ? of_gates.sum(0) : Tensor();
  stack = {of_gates, (of_state * forget).to(before.dtype()), of_bias};
}

// Arguments: the gates of input and hidden state, the hidden state, two biases. Returns the hidden
// state, and for the backward the gates, the hidden state before, and its part of the new one.
inline void gru_cell(const OperatorHandle&, Stack& stack) {
  const Tensor before = stack[2].toTensor();
  std::vector<Tensor> input = with_bias(stack[0].toTensor(), stack[3]).chunk(3, 1);
  std::vector<Tensor> hidden = with_bias(stack[1].toTensor(), stack[4]).chunk(3, 1);
  Tensor wide = before.to(input[0].dtype());
  Tensor reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  Tensor added = (input[2] + reset * hidden[2]).tanh();
  Tensor after = added + update * (wide - added);
  Tensor saved = at::cat({reset, update, added, wide, hidden[2]}, 1);
  stack = {after.to(before.dtype()), saved.to(before.dtype())};
}

// Arguments: gradient of the hidden state, and what gru_cell() saved. Returns gradients of the
// gates of input and hidden state, of the hidden state, and of the two biases.
inline void gru_cell_backward(const OperatorHandle&, Stack& stack) {
  const Tensor given = stack[0].toTensor();
  const bool has_bias = stack[2].toBool();
  std::vector<Tensor> saved = gates_of(stack[1].toTensor(), 5);
  const Tensor &reset = saved[0], &update = saved[1], &added = saved[2];
  Tensor of_after = given.to(reset.dtype());
  Tensor of_update = of_after * (saved[3] - added) * (1 - update) * update;
  Tensor of_added = of_after * (1 - update) * (1 - added * added);
  Tensor of_reset = of_added * saved[4] * (1 - reset) * reset;
  Tensor of_input = at::cat({of_reset, of_update, of_added}, 1).to(given.dtype());
  Tensor of_hidden = at::cat({of_reset, of_update, of_added * reset}, 1).to(given.dtype());
  Tensor of_before = (of_after * update).to(given.dtype());
  stack = {of_input, of_hidden, of_before, has_bias ? of_input.sum(0) : Tensor(),
           has_bias ? of_hidden.sum(0) : Tensor()};
}

// Returns what runs in place of an operator's kernel for the CPU; null: nothing does.
inline Substitute substitute_for(const std::string& name) {
  constexpr auto kFromInteger = &widened<is_integer, at::kDouble>;
  constexpr auto kFrom16Bits = &widened<has_16_bits, at::kFloat>;
  static const std::map<std::string, Substitute> kSubstitutes{
      {"aten::histc", kFromInteger},
      {"aten::avg_pool3d", kFrom16Bits},
      {"aten::avg_pool3d_backward", kFrom16Bits},
      {"aten::_upsample_bilinear2d_aa", kFrom16Bits},
      {"aten::_upsample_bilinear2d_aa_backward", kFrom16Bits},
      {"aten::native_layer_norm_backward", &norm_backward<3, 5>},
      {"aten::native_group_norm_backward", &norm_backward<2, 4>},
      {"aten::native_batch_norm", &batch_norm},
      {"aten::native_batch_norm_backward", &batch_norm_backward},
      {"aten::native_dropout", &native_dropout},
      {"aten::_thnn_fused_lstm_cell", &lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", &gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward},
  };
  auto found = kSubstitutes.find(name);
  return found == kSubstitutes.end() ? nullptr : found->second;
}

}  // namespace sim
