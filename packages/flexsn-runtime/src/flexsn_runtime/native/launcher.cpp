// Executes plans without Python, and joins scans with gradients to autograd.
//
// A plan for tensors of one layout is told once: which tensors a kernel writes, its address, and its arguments. After that a
// call allocates, launches and, where gradients are asked for, notes what its backward needs; the backward, in autograd's
// thread, does the same. Where a backward is not like one that was told, Python's does it.
//
// Tensors are counted so, without those that are not there:
//   forward    those of a call, and behind them what kernels write: results, the last of them bits, and what is kept
//   backward   those of the call, what is kept, the gradients of results but bits (undefined: there is none), and behind them
//              what kernels write: for each tensor of the call its gradient, if it is needed, and what they need besides
// Instead of those of the call and what is kept, a forward may name what it saves (`saved`).
//   last       what is there before a backward's kernel writes, the gradients as they are then, constants, what it writes

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

// Its nodes have names in graphs, profiles and errors.
namespace flexsn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<std::optional<at::Tensor>>;

// Of the CUDA driver and of torch, by address: nothing of CUDA is needed to compile this.
using LaunchOnGpu = int (*)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using CurrentStream = int (*)(std::int32_t, void**);
LaunchOnGpu launch_on_gpu = nullptr;
CurrentStream current_stream = nullptr;

// What a prepared launch depends on of a tensor, and what the dispatcher sees in it: a subclass, or a lazy negation.
class Layout {
 public:
  explicit Layout(const at::Tensor& tensor)
      : sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        keys_(tensor.key_set()),
        dtype_(tensor.scalar_type()),
        device_(tensor.device()),
        place_(place(tensor)) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.key_set() == keys_ && tensor.scalar_type() == dtype_ && tensor.device() == device_ &&
        tensor.sizes().equals(sizes_) && tensor.strides().equals(strides_) && place(tensor) == place_;
  }

 private:
  static int place(const at::Tensor& tensor) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
    return address == 0 ? -1 : static_cast<int>(address % 16);
  }

  std::vector<std::int64_t> sizes_, strides_;
  c10::DispatchKeySet keys_;
  at::ScalarType dtype_;
  at::Device device_;
  int place_;
};

// A tensor that a kernel writes, in each call another one.
class Written {
 public:
  explicit Written(const at::Tensor& like)
      : sizes_(like.sizes().vec()), strides_(like.strides().vec()), dtype_(like.scalar_type()) {}

  at::Tensor allocate(at::Device device) const {
    return at::empty_strided(sizes_, strides_, at::TensorOptions().dtype(dtype_).device(device));
  }

  // Bytes from one part along the first dimension to the next.
  std::int64_t step() const {
    return strides_[0] * static_cast<std::int64_t>(c10::elementSize(dtype_));
  }

 private:
  std::vector<std::int64_t> sizes_, strides_;
  at::ScalarType dtype_;
};

void* address_of(const at::Tensor& tensor) {
  void* const address = tensor.data_ptr();
  TORCH_CHECK(
      address != nullptr || tensor.numel() == 0,
      "a tensor of a compiled scan has no memory. Inside of FakeTensorMode and the like, use backend='torch' or 'hop'.");
  return address;
}

// The driver launches in the thread's context, and crashes where there is none: in a thread that has used no GPU so far. An
// operation of torch's makes one.
void have_context(at::Device device) {
  thread_local std::vector<bool> there;
  const auto index = static_cast<std::size_t>(device.index());
  if (there.size() <= index)
    there.resize(index + 1);
  if (!there[index])
    at::zeros({1}, at::TensorOptions().device(device)).add_(1);
  there[index] = true;
}

// A compiled kernel with all of its arguments but the tensors.
//
// `places`: where each tensor that it takes is among those of a call. `numbers`: behind the tensors, of at most 8 bytes each.
// `kept`: what has to live as long as the address is called. `beside`: rows of programs on a GPU. `offsets`: in bytes, from the
// address of each tensor; none: 0.
class Kernel {
 public:
  Kernel(
      std::uintptr_t entry,
      std::vector<std::size_t> places,
      std::vector<std::int64_t> numbers,
      unsigned programs,
      unsigned threads,
      unsigned shared,
      py::object kept,
      unsigned beside,
      std::vector<std::int64_t> offsets)
      : entry_(entry),
        places_(std::move(places)),
        numbers_(std::move(numbers)),
        programs_(programs),
        threads_(threads),
        shared_(shared),
        kept_(std::move(kept)),
        beside_(beside),
        offsets_(std::move(offsets)) {
    offsets_.resize(places_.size());
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() { // whichever thread is the last to have it
    py::gil_scoped_acquire gil;
    kept_ = py::object();
  }

  void launch(const std::vector<void*>& addresses, at::Device device) const {
    std::vector<std::int64_t> arguments;
    arguments.reserve(places_.size() + numbers_.size() + 1);
    for (std::size_t i = 0; i < places_.size(); ++i)
      arguments.push_back(reinterpret_cast<std::int64_t>(addresses[places_[i]]) + offsets_[i]);
    arguments.insert(arguments.end(), numbers_.begin(), numbers_.end());
    if (device.is_cpu()) {
      arguments.push_back(at::get_num_threads());
      reinterpret_cast<void (*)(const std::int64_t*)>(entry_)(arguments.data());
    } else {
      launch_on(device, arguments);
    }
  }

 private:
  void launch_on(at::Device device, std::vector<std::int64_t>& arguments) const {
    const c10::DeviceGuard guard(device);
    have_context(device);
    void* stream = nullptr;
    TORCH_CHECK(current_stream(device.index(), &stream) == 0, "torch does not tell the current stream of ", device);
    std::vector<void*> pointers;
    pointers.reserve(arguments.size());
    for (auto& argument : arguments)
      pointers.push_back(&argument);
    const int failed = launch_on_gpu(
        reinterpret_cast<void*>(entry_), programs_, beside_, 1, threads_, 1, 1, shared_, stream, pointers.data(), nullptr);
    TORCH_CHECK(failed == 0, "a scan kernel was not launched on ", device, ": CUDA driver error ", failed);
  }

  std::uintptr_t entry_;
  std::vector<std::size_t> places_;
  std::vector<std::int64_t> numbers_;
  unsigned programs_, threads_, shared_;
  py::object kept_;
  unsigned beside_;
  std::vector<std::int64_t> offsets_;
};

using Kernels = std::vector<std::shared_ptr<Kernel>>;

// What becomes of a gradient that a kernel has written: it is seen in a shape and summed over dimensions, again and again,
// and at last in the shape and the dtype of what it is the gradient of.
class Sum {
 public:
  using Steps = std::vector<std::pair<std::optional<std::vector<std::int64_t>>, std::vector<std::int64_t>>>;

  Sum(Steps steps, std::vector<std::int64_t> shape, const at::Tensor& like)
      : steps_(std::move(steps)), shape_(std::move(shape)), dtype_(like.scalar_type()) {}

  at::Tensor of(at::Tensor tensor) const {
    for (const auto& [shape, dims] : steps_) {
      const auto seen = shape ? tensor.view(*shape) : tensor;
      tensor = dims.empty() ? seen.sum() : seen.sum(dims);
    }
    return tensor.view(shape_).to(dtype_);
  }

 private:
  Steps steps_;
  std::vector<std::int64_t> shape_;
  at::ScalarType dtype_;
};

// Results that a kernel writes to one memory, one behind the other, and one sum for all of them.
struct Together {
  std::vector<std::size_t> results;
  Written written;
  Sum sum;
};

// What a call allocates and launches.
class Plan {
 public:
  Plan(const Tensors& written, Kernels kernels, std::vector<Together> together = {})
      : kernels_(std::move(kernels)), together_(std::move(together)) {
    for (const auto& one : written)
      written_.push_back(one ? std::optional<Written>(*one) : std::nullopt);
    for (const auto& group : together_)
      for (const auto i : group.results)
        written_[i] = std::nullopt;
  }

  const std::vector<Together>& together() const {
    return together_;
  }

  std::size_t count() const {
    return written_.size();
  }

  // `tensors`: those of a call that are there, or, where places are kept for them, undefined. Of results in one memory, the first
  // is all of it, and the others are undefined.
  variable_list run(at::TensorList tensors, at::Device device) const {
    RECORD_FUNCTION("flexsn::scan", std::vector<c10::IValue>());
    variable_list results;
    std::vector<void*> addresses;
    results.reserve(written_.size());
    addresses.reserve(tensors.size() + written_.size());
    for (const auto& tensor : tensors)
      addresses.push_back(tensor.defined() ? address_of(tensor) : nullptr);
    for (const auto& one : written_) {
      results.push_back(one ? one->allocate(device) : at::Tensor());
      addresses.push_back(one ? address_of(results.back()) : nullptr);
    }
    for (const auto& group : together_) {
      auto& whole = results[group.results[0]] = group.written.allocate(device);
      auto* address = static_cast<char*>(address_of(whole));
      for (const auto i : group.results) {
        addresses[tensors.size() + i] = address;
        address += group.written.step();
      }
    }
    for (const auto& kernel : kernels_)
      kernel->launch(addresses, device);
    return results;
  }

 private:
  std::vector<std::optional<Written>> written_;
  Kernels kernels_;
  std::vector<Together> together_;
};

variable_list present(const Tensors& tensors) {
  variable_list these;
  for (const auto& tensor : tensors)
    if (tensor)
      these.push_back(*tensor);
  return these;
}

// The forward: the plan's results begin with `first_kept` of the call, of which those from `first_bits` on are bits, and no
// gradient flows through those in `fixed`; behind them is what the backward needs, unless `saved` says what it needs: places of
// what is given and written, or of nothing.
struct Forward {
  Plan plan;
  std::size_t first_bits, first_kept;
  std::vector<std::size_t> fixed;
  std::optional<std::vector<std::optional<std::size_t>>> saved;
};

// What makes another gradient of the first tensor's, of all that is there then: what is given, the gradients, and `constants`.
struct Last {
  std::shared_ptr<Kernel> kernel;
  Written written;
  std::vector<at::Tensor> constants;

  // `addresses`: of what is given.
  at::Tensor of(std::vector<void*> addresses, const variable_list& gradients, at::Device device) const {
    for (const auto& gradient : gradients)
      addresses.push_back(gradient.defined() ? address_of(gradient) : nullptr);
    for (const auto& constant : constants)
      addresses.push_back(address_of(constant));
    auto found = written.allocate(device);
    addresses.push_back(address_of(found));
    kernel->launch(addresses, device);
    return found;
  }
};

// A backward: of tensors and gradients of these layouts, for these needs.
struct Backward {
  std::vector<std::optional<Layout>> given;
  std::vector<bool> needed;
  Plan plan; // writes for each tensor of the forward, of those that are needed, here or in `last`; and what else it needs
  std::vector<std::optional<std::size_t>> taken; // instead of what is written: a gradient that is given, for its sum
  std::vector<std::pair<std::size_t, Written>> copies; // of what is given, which the kernel cannot read as it is
  std::vector<std::optional<Sum>> sums; // of some of them
  std::optional<Last> last;
  bool asks; // whether formulas read something of Python's, which is to be as it was

  bool is_like(const variable_list& tensors, const std::vector<bool>& needs) const {
    const auto fits = [](const at::Tensor& tensor, const std::optional<Layout>& layout) {
      return tensor.defined() == layout.has_value() && (!layout || layout->is_of(tensor));
    };
    return needs == needed && std::equal(tensors.begin(), tensors.end(), given.begin(), given.end(), fits);
  }
};

constexpr std::size_t most_told = 16; // layouts that take turns

class Scan : public torch::CustomClassHolder {
 public:
  // `owner`: gives the `TrainedScan`, which goes on where this cannot, or, if it is gone, None or an error: see `_present`. It is
  // not held here: its step may have the neuron, and that this in the graph of its last state, a circle that nobody would see.
  // `there`: which of a call's tensors are; the others are states that begin with zeros.
  Scan(
      py::object owner,
      std::vector<bool> there,
      Plan plan,
      std::size_t first_bits,
      std::size_t first_kept,
      std::vector<std::size_t> fixed,
      std::optional<std::vector<std::optional<std::size_t>>> saved,
      bool links)
      : there(std::move(there)),
        links(links),
        forward{std::move(plan), first_bits, first_kept, std::move(fixed), std::move(saved)},
        owner_(std::move(owner)) {}
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;
  ~Scan() override {
    py::gil_scoped_acquire gil;
    owner_ = py::object();
  }

  variable_list run(const Tensors& tensors);

  py::object owner(bool needed) const {
    return owner_(needed);
  }

  void follow(
      const Tensors& given,
      std::vector<bool> needed,
      Plan plan,
      std::vector<std::optional<std::size_t>> taken,
      const std::vector<std::pair<std::size_t, at::Tensor>>& copies,
      std::vector<std::optional<Sum>> sums,
      std::optional<Last> last,
      bool asks) {
    auto told = std::make_shared<Backward>(Backward{layouts(given), std::move(needed), std::move(plan)});
    taken.resize(told->needed.size());
    told->taken = std::move(taken);
    for (const auto& [place, like] : copies)
      told->copies.emplace_back(place, Written(like));
    told->sums = std::move(sums);
    told->last = std::move(last);
    told->asks = asks;
    std::shared_ptr<const Backward> oldest; // is gone when the lock is
    const std::lock_guard<std::mutex> lock(mutex_);
    backwards_.insert(backwards_.begin(), std::move(told));
    if (backwards_.size() > most_told) {
      oldest = std::move(backwards_.back());
      backwards_.pop_back();
    }
  }

  // The one that was told of tensors and needs like these.
  std::shared_ptr<const Backward> backward(const variable_list& given, const std::vector<bool>& needed) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& told : backwards_)
      if (told->is_like(given, needed))
        return told;
    return nullptr;
  }

  // From now on, `run_alike` runs calls on tensors like these.
  void expect(const Tensors& tensors, bool grad) {
    expected_ = layouts(tensors);
    for (const auto& tensor : tensors)
      requires_grad_.push_back(tensor && tensor->requires_grad());
    grad_ = grad;
  }

  bool is_expected(const Tensors& tensors) const {
    if (at::GradMode::is_enabled() != grad_ || tensors.size() != expected_.size())
      return false;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      if (tensor.has_value() != expected_[i].has_value())
        return false;
      if (tensor && (!expected_[i]->is_of(*tensor) || (grad_ && tensor->requires_grad() != requires_grad_[i])))
        return false;
    }
    return true;
  }

  const std::vector<bool> there;
  const bool links; // gradients of results but the first come from a reader that hooks of the first do not see
  const Forward forward;

 private:
  static std::vector<std::optional<Layout>> layouts(const Tensors& tensors) {
    std::vector<std::optional<Layout>> found;
    for (const auto& tensor : tensors)
      found.push_back(tensor ? std::optional<Layout>(*tensor) : std::nullopt);
    return found;
  }

  py::object owner_;
  std::vector<std::optional<Layout>> expected_;
  std::vector<bool> requires_grad_;
  bool grad_ = false;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Backward>> backwards_;
};

struct ScanBackward : torch::autograd::Function<ScanBackward> {
  // `tensors`: those of a call that are there.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Scan>& scan, at::TensorList tensors) {
    const auto& [plan, first_bits, first_kept, fixed, named] = scan->forward;
    variable_list saved, results = plan.run(tensors, tensors[0].device());
    if (named) {
      for (const auto& place : *named)
        saved.push_back(!place ? at::Tensor() : *place < tensors.size() ? tensors[*place] : results[*place - tensors.size()]);
    } else {
      saved.assign(tensors.begin(), tensors.end());
      for (auto i = first_kept; i < results.size(); ++i)
        saved.push_back(std::move(results[i]));
    }
    results.resize(first_kept);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["scan"] = c10::IValue::make_capsule(scan);
    if (!fixed.empty()) {
      variable_list without;
      for (const auto i : fixed)
        without.push_back(results[i]);
      context->mark_non_differentiable(without);
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto scan = c10::static_intrusive_pointer_cast<Scan>(context->saved_data["scan"].toCapsule());
    variable_list given;
    try {
      given = context->get_saved_variables();
    } catch (const c10::Error& error) {
      TORCH_CHECK(std::string(error.what_without_backtrace()).find("second time") == std::string::npos,
                  "backward a second time through a scan whose graph an earlier backward has freed. If this is the "
                  "next training step, a state that the scan returned still belongs to the graph of an earlier "
                  "step: reset it between sequences (functional.reset_net(net), neuron.reset()), or cut it off "
                  "between parts of one sequence (functional.detach_net(net), neuron.detach()). To go through one "
                  "graph twice, give the first backward retain_graph=True.");
      throw;
    }
    const auto count = static_cast<std::size_t>(std::count(scan->there.begin(), scan->there.end(), true));
    std::vector<bool> needed;
    for (std::size_t i = 0; i < count; ++i)
      needed.push_back(context->needs_input_grad(i));
    gradients.resize(scan->forward.first_bits);
    if (scan->links)
      look_at_hooks(*scan, gradients);
    for (auto& gradient : gradients)
      given.push_back(std::move(gradient));
    // Python refuses in its own words what no kernel may read.
    const bool refused = c10::impl::TorchDispatchModeTLS::any_modes_set() || has_unreadable(given);
    const auto told = at::GradMode::is_enabled() || refused ? nullptr : scan->backward(given, needed);
    variable_list found{at::Tensor()}; // of what is no tensor
    if (told != nullptr && (!told->asks || reads_hold(*scan)))
      append(found, launched(*told, given));
    else
      append(found, of_python(*scan, given, needed));
    return found;
  }

 private:
  static void append(variable_list& all, variable_list more) {
    for (auto& one : more)
      all.push_back(std::move(one));
  }

  // Whether a hook of the first result would have to see a gradient that came by the others.
  static void look_at_hooks(const Scan& scan, const variable_list& gradients) {
    if (std::none_of(gradients.begin() + 1, gradients.end(), [](const at::Tensor& one) { return one.defined(); }))
      return;
    const auto node = torch::autograd::get_current_node();
    if (node == nullptr || (node->tensor_pre_hooks().empty() && node->retains_grad_hooks().empty()))
      return;
    py::gil_scoped_acquire gil;
    try {
      scan.owner(true).attr("refuse_hooks")();
    } catch (py::error_already_set& error) {
      raised(error);
    }
  }

  static bool has_unreadable(const variable_list& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.numel() != 0 && (!tensor.has_storage() || tensor.data_ptr() == nullptr);
    });
  }

  static bool reads_hold(const Scan& scan) {
    py::gil_scoped_acquire gil;
    try {
      const auto owner = scan.owner(false);
      return owner.is_none() || owner.attr("reads_hold")().cast<bool>();
    } catch (py::error_already_set& error) {
      raised(error);
    }
  }

  static variable_list launched(const Backward& told, variable_list& given) {
    const auto device = given[0].device();
    for (const auto& [place, copy] : told.copies)
      given[place] = copy.allocate(device).copy_(given[place]);
    auto gradients = told.plan.run(given, device);
    gradients.resize(told.needed.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (told.taken[i])
        gradients[i] = given[*told.taken[i]];
      if (gradients[i].defined() && told.sums[i])
        gradients[i] = told.sums[i]->of(std::move(gradients[i]));
    }
    for (const auto& [results, written, sum] : told.plan.together()) {
      const auto parts = sum.of(std::move(gradients[results[0]])).unbind();
      for (std::size_t i = 0; i < parts.size(); ++i)
        gradients[results[i]] = parts[i].detach(); // no view: it is a result
    }
    if (told.last) {
      std::vector<void*> addresses;
      for (const auto& tensor : given)
        addresses.push_back(tensor.defined() ? address_of(tensor) : nullptr);
      gradients[0] = told.last->of(std::move(addresses), gradients, device);
      for (std::size_t i = 0; i < gradients.size(); ++i)
        if (!told.needed[i])
          gradients[i] = at::Tensor();
    }
    return gradients;
  }

  static variable_list of_python(const Scan& scan, const variable_list& given, const std::vector<bool>& needed) {
    py::gil_scoped_acquire gil;
    try {
      py::list all, needs;
      std::size_t next = 0, need = 0;
      for (const bool there : scan.there) {
        if (!scan.forward.saved)
          all.append(there ? py::cast(given[next++]) : py::none());
        needs.append(there && needed[need++]);
      }
      for (; next < given.size(); ++next)
        all.append(given[next].defined() ? py::cast(given[next]) : py::none());
      const auto gradients = scan.owner(true).attr("gradients")(all, needs).cast<Tensors>();
      variable_list found;
      for (std::size_t i = 0; i < scan.there.size(); ++i)
        if (scan.there[i])
          found.push_back(gradients[i].value_or(at::Tensor()));
      return found;
    } catch (py::error_already_set& error) {
      raised(error);
    }
  }

  // As torch hands on an error of Python's through its engine.
  [[noreturn]] static void raised(py::error_already_set& error) {
    error.restore();
    python_error handed;
    handed.persist();
    throw std::move(handed);
  }
};

variable_list Scan::run(const Tensors& tensors) {
  const auto these = present(tensors);
  const auto self = c10::intrusive_ptr<Scan>::reclaim_copy(this);
  const py::gil_scoped_release others_may_run;
  return ScanBackward::apply(self, at::TensorList(these));
}

} // namespace flexsn

using namespace flexsn;

PYBIND11_MODULE(flexsn_launcher, module) {
  module.def("on_gpu", [](std::uintptr_t launch, std::uintptr_t stream) {
    launch_on_gpu = reinterpret_cast<LaunchOnGpu>(launch);
    current_stream = reinterpret_cast<CurrentStream>(stream);
  });
  py::class_<Kernel, std::shared_ptr<Kernel>>(module, "Kernel")
      .def(py::init<
           std::uintptr_t,
           std::vector<std::size_t>,
           std::vector<std::int64_t>,
           unsigned,
           unsigned,
           unsigned,
           py::object,
           unsigned,
           std::vector<std::int64_t>>());
  py::class_<Sum>(module, "Sum").def(py::init<Sum::Steps, std::vector<std::int64_t>, const at::Tensor&>());
  py::class_<Together>(module, "Together")
      .def(py::init([](std::vector<std::size_t> results, const at::Tensor& written, Sum sum) {
        return Together{std::move(results), Written(written), std::move(sum)};
      }));
  py::class_<Last>(module, "Last")
      .def(py::init([](std::shared_ptr<Kernel> kernel, const at::Tensor& written, std::vector<at::Tensor> constants) {
        return Last{std::move(kernel), Written(written), std::move(constants)};
      }));
  py::class_<Plan>(module, "Plan")
      .def(
          py::init<const Tensors&, Kernels, std::vector<Together>>(),
          py::arg("written"),
          py::arg("kernels"),
          py::arg("together") = std::vector<Together>())
      .def("run", torch::wrap_pybind_function([](const Plan& plan, const Tensors& tensors) {
        const auto these = present(tensors);
        const py::gil_scoped_release others_may_run;
        return plan.run(these, these[0].device());
      }));
  py::class_<Scan, c10::intrusive_ptr<Scan>>(module, "Scan")
      .def(py::init<
           py::object,
           std::vector<bool>,
           Plan,
           std::size_t,
           std::size_t,
           std::vector<std::size_t>,
           std::optional<std::vector<std::optional<std::size_t>>>,
           bool>())
      .def("run", torch::wrap_pybind_function([](Scan& scan, const Tensors& tensors) {
        return scan.run(tensors); // with torch's own exceptions, as of memory that is too small
      }))
      .def("run_alike", torch::wrap_pybind_function([](Scan& scan, const Tensors& tensors) -> std::optional<variable_list> {
        if (!scan.is_expected(tensors))
          return std::nullopt;
        return scan.run(tensors);
      }))
      .def("expect", &Scan::expect)
      .def("follow", &Scan::follow);
}
