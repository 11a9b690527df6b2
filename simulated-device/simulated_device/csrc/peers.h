// What ranks exchange, over an inner backend of the CPU: headers that pair launches, and bytes.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "streams.h"

namespace sim {

using at::Tensor;
using c10::intrusive_ptr;
using c10d::ReduceOp;

enum class Kind : int64_t {
  all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, barrier,
  messages,
};

// What one rank expects of one transfer. Ranks pair their transfers by the order of launches alone;
// a header says no more than NCCL would notice, by waiting for ever.
struct Header {
  Kind kind = Kind::barrier;
  int64_t root = 0;          // 0 where the kind has none
  int64_t element_size = 1;  // bytes
  std::vector<int64_t> bytes_to, bytes_from;  // by rank; both as long as the group

  static int64_t length(int size) { return 3 + 2 * size; }

  Tensor to_tensor() const {
    std::vector<int64_t> numbers{static_cast<int64_t>(kind), root, element_size};
    numbers.insert(numbers.end(), bytes_to.begin(), bytes_to.end());
    numbers.insert(numbers.end(), bytes_from.begin(), bytes_from.end());
    return at::tensor(numbers, at::kLong);
  }

  static Header from_tensor(const Tensor& tensor) {
    const auto* numbers = tensor.const_data_ptr<int64_t>();
    int64_t size = (tensor.numel() - length(0)) / 2;
    const auto* sizes = numbers + length(0);
    return {static_cast<Kind>(numbers[0]), numbers[1], numbers[2],
            {sizes, sizes + size}, {sizes + size, sizes + 2 * size}};
  }

  // Whether what rank `own` sends to rank `other` is what that expects, and the other way round.
  bool fits(int own, const Header& header, int other) const {
    return kind == header.kind && root == header.root && element_size == header.element_size &&
           bytes_to[other] == header.bytes_from[own] && bytes_from[other] == header.bytes_to[own];
  }
};

// A message to or from one rank.
struct Message {
  int peer;
  bool is_sent;
  Tensor bytes;  // sent: its content; received: where it goes. uint8, one dimension
};

inline Tensor as_bytes(const Tensor& flat) {
  return flat.scalar_type() == at::kByte ? flat : flat.view(at::kByte);
}

// Copies one-dimensional tensors into one of bytes, which other ranks' bytes may be written to.
inline Tensor pack(const std::vector<Tensor>& pieces) {
  if (pieces.empty()) return at::empty({0}, at::kByte);
  std::vector<Tensor> bytes;
  for (const Tensor& piece : pieces) bytes.push_back(as_bytes(piece));
  return at::cat(bytes);
}

inline void unpack(const Tensor& bytes, const std::vector<Tensor>& pieces) {
  int64_t start = 0;
  for (const Tensor& piece : pieces) {
    int64_t size = piece.numel() * static_cast<int64_t>(piece.element_size());
    as_bytes(piece).copy_(bytes.narrow(0, start, size));
    start += size;
  }
}

inline int64_t sum(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// The other ranks, as one exchange sees them. What it calls holds the engine's lock, except while
// it waits; so no exchange is in the midst of a tensor when the process ends. The inner backend
// gets memory of its own, never that of a device: after an abort, it may still write to it.
class Peers {
 public:
  Peers(Lock* lock, StreamIndex stream, intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : lock_(lock), stream_(stream), inner_(std::move(inner)), rank_(rank), size_(size) {}

  int rank() const { return rank_; }

  // Tells all ranks one's header, and returns when all fit; waits for an abort if they do not.
  void meet(const Header& header) {
    if (size_ == 1 || is_echo()) return;
    std::vector<std::vector<Tensor>> received(1);
    for (int i = 0; i < size_; i++)
      received[0].push_back(at::empty({Header::length(size_)}, at::kLong));
    std::vector<Tensor> sent{header.to_tensor()};
    wait({inner_->allgather(received, sent)});
    std::vector<Header> headers;
    for (const Tensor& tensor : received[0]) headers.push_back(Header::from_tensor(tensor));
    for (int i = 0; i < size_; i++)
      for (int j = 0; j < size_; j++)
        if (!headers[i].fits(i, headers[j], j)) Engine::get().wait_for_abort(*lock_, stream_);
  }

  // Returns the reduction of all ranks' values.
  Tensor all_reduce(const Tensor& values, const ReduceOp& op) {
    Tensor staged = values.clone();
    premultiply(staged, op);
    if (plain(op).op_ == ReduceOp::SUM) {
      staged = sum_by_rank(staged);
    } else if (size_ > 1 && !is_echo()) {
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      std::vector<Tensor> tensors{staged};
      wait({inner_->allreduce(tensors, options)});
    }
    divide(staged, op);
    return staged;
  }

  // Returns the root's bytes.
  Tensor broadcast(const Tensor& bytes, int root) {
    Tensor staged = bytes.clone();
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<Tensor> tensors{staged};
    if (size_ > 1 && staged.numel() > 0 && !is_echo())
      wait({inner_->broadcast(tensors, options)});
    return staged;
  }

  // Returns all ranks' bytes one after another; `sizes` says how many each has.
  Tensor all_gather(const Tensor& bytes, const std::vector<int64_t>& sizes) {
    std::vector<Tensor> pieces;
    for (int64_t size : sizes) pieces.push_back(at::empty({size}, at::kByte));
    pieces[rank_].copy_(bytes);
    if (is_echo()) {
      for (Tensor& piece : pieces)
        if (piece.numel() == bytes.numel()) piece.copy_(bytes);
        else piece.zero_();
      return at::cat(pieces);
    }
    bool is_even = std::all_of(sizes.begin(), sizes.end(), [&](auto s) { return s == sizes[0]; });
    if (!is_even) {
      for (int root = 0; root < size_; root++) pieces[root] = broadcast(pieces[root], root);
    } else if (size_ > 1 && sizes[0] > 0) {
      std::vector<std::vector<Tensor>> received{pieces};
      std::vector<Tensor> sent{pieces[rank_].clone()};
      wait({inner_->allgather(received, sent)});
    }
    return at::cat(pieces);
  }

  // Sends each rank its part of `bytes`, and returns the parts of all ranks one after another.
  Tensor all_to_all(Tensor bytes, std::vector<int64_t> bytes_to, std::vector<int64_t> bytes_from) {
    if (size_ == 1) return bytes;
    if (is_echo()) return at::zeros({sum(bytes_from)}, at::kByte);
    Tensor received = at::empty({sum(bytes_from)}, at::kByte);
    wait({inner_->alltoall_base(received, bytes, bytes_from, bytes_to)});
    return received;
  }

  // Exchanges headers, then bytes, with those ranks that the header has bytes for.
  void send_and_receive(const Header& header, const std::vector<Message>& messages, int tag);

 private:
  // Whether there are no others, as in the timed mode: every rank has what this one has.
  bool is_echo() const { return size_ > 1 && !lock_; }

  static bool has_factor(const ReduceOp& op) { return op.op_ == ReduceOp::PREMUL_SUM; }

  static ReduceOp plain(const ReduceOp& op) {
    bool is_sum = op.op_ == ReduceOp::AVG || has_factor(op);
    return is_sum ? ReduceOp(ReduceOp::SUM) : op;
  }

  static void premultiply(Tensor& values, const ReduceOp& op) {
    if (!has_factor(op)) return;
    auto* supplement = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(!supplement->tensor_factor.defined(), "simccl: a factor must be a number");
    values.mul_(supplement->double_factor);
  }

  // Adds in the order of ranks, which NCCL does not promise: so that an oracle can say every bit.
  Tensor sum_by_rank(const Tensor& values) {
    int64_t size = values.numel() * static_cast<int64_t>(values.element_size());
    if (size_ == 1 || size == 0) return values;
    Tensor everyone = all_gather(as_bytes(values), std::vector<int64_t>(size_, size));
    Tensor total = everyone.narrow(0, 0, size).clone().view(values.scalar_type());
    for (int rank = 1; rank < size_; rank++)
      total.add_(everyone.narrow(0, rank * size, size).clone().view(values.scalar_type()));
    return total;
  }

  void divide(Tensor& values, const ReduceOp& op) const {
    if (op.op_ != ReduceOp::AVG) return;
    if (at::isIntegralType(values.scalar_type(), true)) values.div_(size_, "trunc");
    else values.div_(size_);
  }

  void wait(const std::vector<intrusive_ptr<c10d::Work>>& works) {
    auto& engine = Engine::get();
    bool is_lost = false;  // a rank has ended: the others' kernels wait on, as NCCL's do
    engine.without_lock(*lock_, [&] {
      try {
        for (const auto& work : works) work->wait();
      } catch (const std::exception&) {
        is_lost = true;
      }
    });
    if (is_lost) engine.wait_for_abort(*lock_, stream_);
    TORCH_CHECK(!engine.stream(stream_).is_aborted, "simccl: the group was aborted");
  }

  Lock* lock_;          // held by this thread; null where no other rank is waited for
  StreamIndex stream_;  // whose exchange this is
  intrusive_ptr<c10d::Backend> inner_;
  int rank_, size_;
};

inline void Peers::send_and_receive(const Header& header, const std::vector<Message>& messages,
                                    int tag) {
  std::vector<int> peers;
  for (int peer = 0; peer < size_; peer++)
    if (header.bytes_to[peer] + header.bytes_from[peer] > 0) peers.push_back(peer);

  // Sends `outgoing` and receives into `incoming`, both by the order of `peers`.
  auto exchange = [&](std::vector<Tensor>& outgoing, std::vector<Tensor>& incoming, int own_tag) {
    std::vector<intrusive_ptr<c10d::Work>> works;
    for (size_t i = 0; i < peers.size(); i++) {
      std::vector<Tensor> sent{outgoing[i]}, received{incoming[i]};
      if (sent[0].numel()) works.push_back(inner_->send(sent, peers[i], own_tag));
      if (received[0].numel()) works.push_back(inner_->recv(received, peers[i], own_tag));
    }
    wait(works);
  };

  std::vector<Tensor> outgoing, incoming;
  for (size_t i = 0; i < peers.size(); i++) {
    outgoing.push_back(header.to_tensor());
    incoming.push_back(at::empty({Header::length(size_)}, at::kLong));
  }
  exchange(outgoing, incoming, tag);
  for (size_t i = 0; i < peers.size(); i++)
    if (!header.fits(rank_, Header::from_tensor(incoming[i]), peers[i]))
      Engine::get().wait_for_abort(*lock_, stream_);

  std::vector<std::vector<Tensor>> targets(peers.size());
  for (size_t i = 0; i < peers.size(); i++) {
    std::vector<Tensor> sources;
    for (const Message& message : messages)
      if (message.peer == peers[i])
        (message.is_sent ? sources : targets[i]).push_back(message.bytes);
    outgoing[i] = pack(sources);
    incoming[i] = at::empty({header.bytes_from[peers[i]]}, at::kByte);
  }
  exchange(outgoing, incoming, tag + 1);
  for (size_t i = 0; i < peers.size(); i++) unpack(incoming[i], targets[i]);
}

}  // namespace sim
