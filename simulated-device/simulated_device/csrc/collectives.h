// "simccl", a backend of torch.distributed that behaves as NCCL's does.
//
// A launch is a task of the group's own stream, which starts after the current stream's tasks;
// work.wait() makes the current stream wait, and lets the host go on. Pairing is by the order of
// launches within the group, and nothing else.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "operands.h"
#include "peers.h"
#include "works.h"

namespace sim {

class SimCCL final : public c10d::Backend {
 public:
  // The group's ranks lie on `num_nodes` nodes, as many on each.
  SimCCL(int rank, int size, intrusive_ptr<Backend> inner, int num_nodes)
      : Backend(rank, size), inner_(std::move(inner)), num_nodes_(num_nodes) {}
  ~SimCCL() override {
    Lock lock;
    for (auto [peer, stream] : streams_) Engine::get().close(stream);
  }

  const std::string getBackendName() const override { return "simccl"; }
  intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  // Collectives so far, those of one rank with another aside.
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}

  // Ends all waits of this group, here and for good. As on a GPU, the host is not told unless it
  // waits for a collective: what that should have written is undefined.
  void abort() override { abort_all(); }

  // The same, but lets collectives end that all ranks have launched.
  void shutdown() override {
    constexpr auto kPatience = std::chrono::seconds(5);
    {
      Lock lock;
      Time deadline = now() + kPatience;
      for (auto [peer, stream] : streams_) Engine::get().drain(lock, stream, deadline);
    }
    abort_all();
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    TORCH_CHECK(!coalesced_, "simccl: coalescing blocks cannot be nested");
    coalesced_ = Launch{.type = OpType::COALESCED};
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalesced_, "simccl: there is no coalescing block");
    Launch launch = std::move(*coalesced_);
    coalesced_.reset();
    if (launch.transfers.empty() && launch.messages.empty()) return nullptr;
    return start(std::move(launch), kAllRanks);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensor own = only(tensors);
    int root = static_cast<int>(options.rootRank);
    bool is_root = root == rank_;
    Header header = header_of(Kind::broadcast, own, root);
    if (is_root) header.bytes_to.assign(size_, bytes_of(own));
    header.bytes_from[root] = bytes_of(own);
    auto move = [values = flat_operand(own), root](Peers& peers) {
      unpack(peers.broadcast(pack({values}), root), {values});
    };
    Tensors reads, writes;
    (is_root ? reads : writes).push_back(own);
    return submit({"broadcast", OpType::BROADCAST, reads, writes, {{header, move}}});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Launch launch{"all_reduce", OpType::ALLREDUCE, {}, tensors};
    for (const Tensor& tensor : tensors) {
      auto move = [values = flat_operand(tensor), op = options.reduceOp](Peers& peers) {
        values.copy_(peers.all_reduce(values, op));
      };
      launch.transfers.push_back({symmetric(Kind::all_reduce, tensor, bytes_of(tensor),
                                            bytes_of(tensor)), move});
    }
    return submit(std::move(launch));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                            const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensor own = only(tensors);
    int root = static_cast<int>(options.rootRank);
    Header header = header_of(Kind::reduce, own, root);
    header.bytes_to[root] = bytes_of(own);
    if (root == rank_) header.bytes_from.assign(size_, bytes_of(own));
    auto move = [values = flat_operand(own), op = options.reduceOp, root](Peers& peers) {
      Tensor reduced = peers.all_reduce(values, op);
      if (peers.rank() == root) values.copy_(reduced);
    };
    Tensors reads, writes;
    (root == rank_ ? writes : reads).push_back(own);
    return submit({"reduce", OpType::REDUCE, reads, writes, {{header, move}}});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::AllgatherOptions&) override {
    Tensor own = only(inputs);
    return submit({"all_gather", OpType::ALLGATHER, inputs, only(outputs),
                   {gather_transfer(own, only(outputs), bytes_of_each(only(outputs)))}});
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                        const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_single(outputs, inputs, OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override {
    return gather_single(outputs, inputs, OpType::COALESCED);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ReduceScatterOptions& options) override {
    Tensor own = only(outputs);
    Header header = header_of(Kind::reduce_scatter, own, 0);
    header.bytes_to = bytes_of_each(only(inputs));
    header.bytes_from.assign(size_, bytes_of(own));
    auto transfer = scatter_transfer(header, own, only(inputs), options.reduceOp);
    return submit({"reduce_scatter", OpType::REDUCE_SCATTER, only(inputs), outputs, {transfer}});
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                             const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return scatter_single(outputs, inputs, options.reduceOp, OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override {
    return scatter_single(outputs, inputs, options.reduceOp, OpType::COALESCED);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    Header header = header_of(Kind::all_to_all, input, 0);
    header.bytes_to = bytes_of_splits(input, input_splits);
    header.bytes_from = bytes_of_splits(output, output_splits);
    return submit({"all_to_all_single", OpType::ALLTOALL_BASE, {input}, {output},
                   {redistribution(header, {input}, {output})}});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    Header header = header_of(Kind::all_to_all, inputs.at(0), 0);
    header.bytes_to = bytes_of_each(inputs);
    header.bytes_from = bytes_of_each(outputs);
    return submit({"all_to_all", OpType::ALLTOALL, inputs, outputs,
                   {redistribution(header, inputs, outputs)}});
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
               const c10d::GatherOptions& options) override {
    Tensor own = only(inputs);
    int root = static_cast<int>(options.rootRank);
    Tensors received = root == rank_ ? only(outputs) : Tensors{};
    Header header = header_of(Kind::gather, own, root);
    header.bytes_to[root] = bytes_of(own);
    if (root == rank_) header.bytes_from = bytes_of_each(received);
    return submit({"gather", OpType::GATHER, inputs, received,
                   {redistribution(header, inputs, received)}});
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                const c10d::ScatterOptions& options) override {
    Tensor own = only(outputs);
    int root = static_cast<int>(options.rootRank);
    Tensors sent = root == rank_ ? only(inputs) : Tensors{};
    Header header = header_of(Kind::scatter, own, root);
    header.bytes_from[root] = bytes_of(own);
    if (root == rank_) header.bytes_to = bytes_of_each(sent);
    return submit({"scatter", OpType::SCATTER, sent, outputs,
                   {redistribution(header, sent, outputs)}});
  }

  // Tags are ignored, as NCCL does.
  WorkPtr send(Tensors& tensors, int peer, int) override {
    Message message{peer, true, as_bytes(flat_operand(only(tensors)))};
    return submit({"send", OpType::SEND, tensors, {}, {}, {message}}, peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    Message message{peer, false, as_bytes(flat_operand(only(tensors)))};
    return submit({"recv", OpType::RECV, {}, tensors, {}, {message}}, peer);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Header header{Kind::barrier, 0, 1, std::vector<int64_t>(size_), std::vector<int64_t>(size_)};
    Launch launch{"barrier", OpType::BARRIER, {}, {}, {{header, [](Peers&) {}}}};
    launch.blocks_host = true;
    return submit(std::move(launch));
  }

 private:
  static constexpr int kAllRanks = -1;

  template <typename T>
  static T& only(std::vector<T>& list) {
    TORCH_CHECK(list.size() == 1, "simccl takes one tensor of each rank, got ", list.size());
    return list[0];
  }

  // ---- transfers

  Header header_of(Kind kind, const Tensor& tensor, int root) const {
    return {kind, root, static_cast<int64_t>(tensor.element_size()), std::vector<int64_t>(size_),
            std::vector<int64_t>(size_)};
  }

  Header symmetric(Kind kind, const Tensor& tensor, int64_t bytes_to, int64_t bytes_from) const {
    Header header = header_of(kind, tensor, 0);
    header.bytes_to.assign(size_, bytes_to);
    header.bytes_from.assign(size_, bytes_from);
    return header;
  }

  Transfer gather_transfer(const Tensor& input, const Tensors& outputs,
                           std::vector<int64_t> sizes) const {
    Header header = symmetric(Kind::all_gather, input, bytes_of(input), 0);
    header.bytes_from = sizes;
    auto move = [own = flat_operand(input), pieces = flat_operands(outputs), sizes](Peers& peers) {
      unpack(peers.all_gather(pack({own}), sizes), pieces);
    };
    return {header, move};
  }

  WorkPtr gather_single(const Tensors& outputs, const Tensors& inputs, OpType type) {
    Launch launch{"all_gather_single", type, inputs, outputs};
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_,
                        "output tensor size must be equal to world_size times input tensor size");
      launch.transfers.push_back(gather_transfer(
          inputs[i], {outputs[i]}, std::vector<int64_t>(size_, bytes_of(inputs[i]))));
    }
    return submit(std::move(launch));
  }

  // Scatters the reduction of `inputs`, which have one piece after another for each rank.
  Transfer scatter_transfer(const Header& header, const Tensor& output, const Tensors& inputs,
                            const ReduceOp& op) const {
    int64_t start = 0;
    for (int i = 0; i < rank_; i++) start += header.bytes_to[i] / header.element_size;
    auto move = [own = flat_operand(output), pieces = flat_operands(inputs), op,
                 start](Peers& peers) {
      own.copy_(peers.all_reduce(at::cat(pieces), op).narrow(0, start, own.numel()));
    };
    return {header, move};
  }

  WorkPtr scatter_single(const Tensors& outputs, const Tensors& inputs, const ReduceOp& op,
                       OpType type) {
    Launch launch{"reduce_scatter_single", type, inputs, outputs};
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_,
                        "input tensor must be the same size as output size times world size");
      int64_t piece = bytes_of(outputs[i]);
      Header header = symmetric(Kind::reduce_scatter, outputs[i], piece, piece);
      launch.transfers.push_back(scatter_transfer(header, outputs[i], {inputs[i]}, op));
    }
    return submit(std::move(launch));
  }

  // Moves the bytes that the header names; for all kinds without arithmetic.
  static Transfer redistribution(const Header& header, const Tensors& inputs,
                                 const Tensors& outputs) {
    auto move = [header, sent = flat_operands(inputs), received = flat_operands(outputs)](
                    Peers& peers) {
      unpack(peers.all_to_all(pack(sent), header.bytes_to, header.bytes_from), received);
    };
    return {header, move};
  }

  std::vector<int64_t> bytes_of_splits(const Tensor& tensor,
                                       const std::vector<int64_t>& splits) const {
    if (splits.empty()) return std::vector<int64_t>(size_, bytes_of(tensor) / size_);
    std::vector<int64_t> sizes;
    int64_t row = tensor.dim() && tensor.size(0) ? bytes_of(tensor) / tensor.size(0) : 0;
    for (int64_t rows : splits) sizes.push_back(rows * row);
    return sizes;
  }

  Header header_of(const std::vector<Message>& messages) const {
    Header header{Kind::messages, 0, 1, std::vector<int64_t>(size_), std::vector<int64_t>(size_)};
    for (const Message& message : messages)
      (message.is_sent ? header.bytes_to : header.bytes_from)[message.peer] +=
          message.bytes.numel();
    return header;
  }

  // ---- launches

  // Starts a launch, or adds it to an open coalescing block.
  WorkPtr submit(Launch launch, int peer = kAllRanks) {
    if (!coalesced_) return start(std::move(launch), peer);
    auto work = c10::make_intrusive<CoalescedWork>(rank_, launch.type);
    coalesced_->append(std::move(launch));
    return work;
  }

  // Launches on the stream of all ranks, or on that of the messages between this rank and a peer.
  WorkPtr start(Launch launch, int peer) {
    HostPause pause;
    DeviceIndex device = device_of_group(launch);
    if (peer == kAllRanks) sequence_++;
    auto stash = std::make_shared<Tensors>(launch.reads);
    stash->insert(stash->end(), launch.writes.begin(), launch.writes.end());
    Tensors values = launch.writes.empty() ? launch.reads : launch.writes;
    std::vector<Stash> released = take_finished_stashes();
    intrusive_ptr<SimWork> work;
    c10::Stream stream = stream_of(device, 0);
    {
      Lock lock;
      auto& engine = Engine::get();
      TORCH_CHECK_WITH(DistBackendError, !is_aborted_, "simccl: the group was aborted");
      StreamIndex index = stream_to(device, peer);
      stream = stream_of(device, engine.stream(index).id);
      Task task = make_task(launch, index, peer, stash);
      if (engine.is_timed()) time(task, launch);
      Point point = engine.launch(lock, index, std::move(task),
                                  {engine.moment(current_stream(device))});
      for (const Tensor& tensor : launch.reads) note_use(tensor, false, point, launch.name);
      for (const Tensor& tensor : launch.writes) note_use(tensor, true, point, launch.name);
      Moment end{point, engine.stream(index).clock};
      stashes_.emplace_back(end, stash);
      work = c10::make_intrusive<SimWork>(rank_, launch.type, device, end, stash,
                                          launch.blocks_host);
    }
    work->complete_future(stream, values);
    return work;
  }

  // Says how long a launch takes: every kind as a ring that passes on its bytes.
  void time(Task& task, const Launch& launch) const {
    double total = 0, moved = 0;
    for (const Transfer& transfer : launch.transfers) {
      const Header& header = transfer.header;
      double to = 0, from = 0;
      for (int other = 0; other < size_; other++) {
        if (other == rank_) continue;
        to += static_cast<double>(header.bytes_to[other]);
        from += static_cast<double>(header.bytes_from[other]);
      }
      double passed = std::max(to, from);
      moved += to + from;
      if (header.kind == Kind::all_reduce) passed *= 2.0 / size_;
      total += Engine::get().rates.ring(passed, size_, num_nodes_);
    }
    for (const Message& message : launch.messages)
      total += Engine::get().rates.ring(static_cast<double>(message.bytes.numel()), 2,
                                        num_nodes_ > 1 ? 2 : 1);
    task.seconds = total;
    task.is_small = moved <= kSmallMovedBytes && launch.messages.empty();
  }

  DeviceIndex device_of_group(const Launch& launch) {
    DeviceIndex device = current_device;
    if (!launch.reads.empty()) device = launch.reads[0].device().index();
    else if (!launch.writes.empty()) device = launch.writes[0].device().index();
    if (device_ < 0) device_ = device;
    TORCH_CHECK(device == device_, "simccl: this group was first used on sim:", int{device_},
                ", now on sim:", int{device});
    return device;
  }

  StreamIndex stream_to(DeviceIndex device, int peer) {
    auto found = streams_.find(peer);
    if (found != streams_.end()) return found->second;
    auto& engine = Engine::get();
    StreamIndex index = engine.index_of(device, engine.new_stream_id());
    // A group of one waits for nobody: its exchanges run as kernels do.
    // Nor does any where nothing runs: all ranks are taken to be as far as this one.
    if (size_ > 1 && !engine.is_timed()) engine.start_worker(index);
    return streams_[peer] = index;
  }

  Task make_task(const Launch& launch, StreamIndex stream, int peer, const Stash& stash) const {
    auto exchange = [transfers = launch.transfers, messages = launch.messages, stash, stream, peer,
                     header = header_of(launch.messages), inner = inner_, rank = rank_,
                     size = size_](Lock* lock) {
      // Messages of a coalescing block never meet single ones: NCCL has other communicators then.
      constexpr int kSingle = 0x51A0, kCoalesced = 0x51A2;
      Peers peers(lock, stream, inner, rank, size);
      for (const Transfer& transfer : transfers) {
        peers.meet(transfer.header);
        transfer.move(peers);
      }
      if (!messages.empty())
        peers.send_and_receive(header, messages, peer == kAllRanks ? kCoalesced : kSingle);
    };
    if (size_ == 1 || Engine::get().is_timed())
      return {.name = launch.name, .run = [exchange] { exchange(nullptr); }};
    return {.name = launch.name, .exchange = [exchange](Lock& lock) { exchange(&lock); }};
  }

  // Returns the stashes of launches that have ended, whether or not somebody waited for them.
  std::vector<Stash> take_finished_stashes() {
    std::vector<Stash> finished;
    Lock lock;
    auto& engine = Engine::get();
    auto first = std::stable_partition(stashes_.begin(), stashes_.end(), [&](const auto& entry) {
      return !entry.second->empty() && !engine.is_finished(entry.first.point);
    });
    for (auto entry = first; entry != stashes_.end(); ++entry) {
      if (!entry->second->empty()) engine.host_learns(entry->first.clock);
      finished.push_back(std::move(entry->second));
    }
    stashes_.erase(first, stashes_.end());
    return finished;
  }

  void abort_all() {
    Lock lock;
    is_aborted_ = true;
    for (auto [peer, stream] : streams_) Engine::get().abort(stream);
  }

  intrusive_ptr<Backend> inner_;  // of the CPU, over the same ranks
  int num_nodes_;
  DeviceIndex device_ = -1;       // of all launches; set by the first
  std::map<int, StreamIndex> streams_;  // by peer, kAllRanks for collectives; made when first used
  std::optional<Launch> coalesced_;     // what an open coalescing block has collected
  std::vector<std::pair<Moment, Stash>> stashes_;  // of launches that may not have ended
  bool is_aborted_ = false;                        // no more launches
  uint64_t sequence_ = 0;
};

}  // namespace sim
