// Carries out launch plans (launch_plan.py) for ops of torch, without Python.
//
// launcher.py compiles this file at first use, gives it the addresses of torch's C functions and of CUDA's driver, and
// registers `boxed_<i>` as the CUDA kernel of the op with number i. A call looks up the plan of its operands' layouts. If
// there is none, it calls the same op in Python, which runs the call and, by `learn`, enters the plan for the next one.
//
// torch's C functions (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h) are stable: a kernel gets
// its arguments as 64-bit values on a stack, owns them, and replaces them by its results.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Value = uint64_t;  // StableIValue
using Tensor = void *;   // AtenTensorHandle
using Stream = void *;

// ---- functions of others -------------------------------------------------------------------------------------------

struct LaunchAttribute {  // CUlaunchAttribute
    int id;
    char padding[4];
    union {
        char bytes[64];
        int number;
        unsigned sizes[3];
    } value;
};
constexpr int CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    Stream stream;
    LaunchAttribute *attributes;
    unsigned count;
};

struct alignas(64) TensorMap {
    char bytes[128];
};

// The addresses in the order of launcher.py's `FUNCTIONS`.
struct Functions {
    int (*data_ptr)(Tensor, void **);
    int (*dim)(Tensor, int64_t *);
    int (*sizes)(Tensor, int64_t **);
    int (*strides)(Tensor, int64_t **);
    int (*dtype)(Tensor, int32_t *);
    int (*device_index)(Tensor, int32_t *);
    size_t (*element_size)(int32_t);
    int (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Tensor *);
    int (*delete_tensor)(Tensor);
    int (*string_data)(void *, const char **);
    int (*string_length)(void *, size_t *);
    int (*delete_string)(void *);
    int (*list_size)(void *, size_t *);
    int (*list_item)(void *, size_t, Value *);
    int (*delete_list)(void *);
    int (*call_op)(const char *, const char *, Value *, uint64_t);
    int (*view)(Tensor, int64_t, const int64_t *, const int64_t *, int64_t, Tensor *);
    int (*torch_device)(int32_t *);
    int (*scaled_mm)(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor *, Tensor *, int32_t *, int32_t);
    int (*current_stream)(int32_t, Stream *);
    int (*current_device)(int *);
    int (*retain_context)(void **, int);
    int (*set_context)(void *);
    int (*release_context)(int);
    int (*set_bytes)(uint64_t, unsigned char, size_t, Stream);
    int (*set_words)(uint64_t, unsigned, size_t, Stream);
    int (*launch)(const LaunchConfig *, void *, void **, void **);
    int (*encode_map)(TensorMap *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                      const uint32_t *, int, int, int, int);
};

Functions functions;
uint64_t torch_version;
int32_t device_type;
const int32_t *listeners;  // not 0 while Python counts calls (launches.py)

void check(int error, const char *what) {
    if (error != 0) throw std::runtime_error(std::string("lowbit: ") + what + " returned error " + std::to_string(error));
}

// ---- plans -----------------------------------------------------------------------------------------------------------

// An allocated tensor without elements. A result that is not wanted is a view of it, which costs no allocation.
struct Empty {
    Tensor made;
    explicit Empty(Tensor made) : made(made) {}
    Empty(const Empty &) = delete;
    ~Empty() { functions.delete_tensor(made); }
};

struct Buffer {
    int32_t dtype;
    std::vector<int64_t> sizes, strides;
    int64_t filled;  // bytes to fill with `word`
    unsigned word;
    std::shared_ptr<const Empty> empty;  // null: allocated at each call

    bool has_elements() const {
        for (const int64_t size : sizes)
            if (size == 0) return false;
        return true;
    }
    Tensor allocated(int32_t device) const {
        Tensor made;
        check(functions.empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(), dtype, device_type, device, &made),
              "aoti_torch_empty_strided");
        return made;
    }
};

struct Argument {
    enum Kind : int64_t { NUMBER, ADDRESS, MAP } kind;
    int64_t tensor, number;           // `number` is also the offset of an address or a map
    int64_t size, rows, columns, stride, box, width;
};

// A contiguous tensor in the memory of the tensor with this number, from `offset` bytes on, and of its dtype. A bias
// that is not given has `dim` -1.
struct Part {
    int64_t dim, sizes[2], tensor, offset;
};

struct CublasProduct {
    Part a, b, a_scale, b_scale, bias, out;
};

struct Launch {
    bool is_product;
    CublasProduct product;
    void *function;
    unsigned grid, threads, shared;
    bool overlaps;
    unsigned cluster;
    std::vector<Argument> arguments;
};

struct Plan {
    bool in_python;  // the op has nothing to plan for such operands
    std::vector<Buffer> results, scratch;
    std::vector<Launch> launches;
};

// Reads the numbers in which launcher.py writes a plan, for tensors on this device.
struct Reader {
    const int64_t *next;
    const int32_t device;

    int64_t number() { return *next++; }
    std::vector<int64_t> numbers(int64_t count) {
        std::vector<int64_t> found(next, next + count);
        next += count;
        return found;
    }
    std::vector<Buffer> buffers() {
        std::vector<Buffer> found(number());
        for (Buffer &buffer : found) {
            buffer.dtype = (int32_t)number();
            const int64_t dim = number();
            buffer.sizes = numbers(dim);
            buffer.strides = numbers(dim);
            buffer.filled = number();
            buffer.word = (unsigned)number();
        }
        return found;
    }
    Argument argument() {
        Argument one = {};
        one.kind = (Argument::Kind)number();
        if (one.kind != Argument::NUMBER) one.tensor = number();
        if (one.kind == Argument::MAP) {
            one.size = number(), one.rows = number(), one.columns = number();
            one.stride = number(), one.box = number(), one.width = number();
        }
        one.number = number();
        return one;
    }
    Part part() {
        Part one = {number(), {1, 1}, -1, 0};
        for (int64_t i = 0; i < one.dim; ++i) one.sizes[i] = number();
        if (one.dim >= 0) one.tensor = number(), one.offset = number();
        return one;
    }
    std::shared_ptr<const Plan> plan() {
        auto found = std::make_shared<Plan>();
        found->in_python = number() != 0;
        if (found->in_python) return found;
        const bool in_inference_mode = number() != 0;  // such a tensor, or a view of it, could not be used elsewhere
        found->results = buffers();
        for (Buffer &buffer : found->results)
            if (!in_inference_mode && !buffer.has_elements()) buffer.empty = std::make_shared<Empty>(buffer.allocated(device));
        found->scratch = buffers();
        found->launches.resize(number());
        for (Launch &launch : found->launches) {
            launch.is_product = number() != 0;
            if (launch.is_product) {
                CublasProduct &one = launch.product;
                for (Part *each : {&one.a, &one.b, &one.a_scale, &one.b_scale, &one.bias, &one.out}) *each = part();
                continue;
            }
            launch.function = (void *)number();
            launch.grid = (unsigned)number(), launch.threads = (unsigned)number(), launch.shared = (unsigned)number();
            launch.overlaps = number() != 0, launch.cluster = (unsigned)number();
            launch.arguments.resize(number());
            for (Argument &one : launch.arguments) one = argument();
        }
        return found;
    }
};

// ---- ops -------------------------------------------------------------------------------------------------------------

using Key = std::vector<int64_t>;

struct Hash {
    size_t operator()(const Key &key) const {
        uint64_t hash = key.size();
        for (int64_t one : key) {
            hash ^= (uint64_t)one;
            hash *= 0x9e3779b97f4a7c15u;
            hash ^= hash >> 29;
        }
        return hash;
    }
};

constexpr size_t MOST_PLANS = 8192;  // of an op; shapes that change at every call must not fill the memory

struct Op {
    std::string python;     // the op that Python computes
    std::string arguments;  // one letter each: t tensor, o tensor or None, s string, b bool, d dtype, n number, l list
    std::unordered_map<Key, std::shared_ptr<const Plan>, Hash> plans;
    std::shared_mutex mutex;

    std::shared_ptr<const Plan> find(const Key &key) {
        std::shared_lock lock(mutex);
        const auto at = plans.find(key);
        return at == plans.end() ? nullptr : at->second;
    }
    void enter(const Key &key, std::shared_ptr<const Plan> plan) {
        std::unique_lock lock(mutex);
        if (plans.size() >= MOST_PLANS) plans.clear();
        plans[key] = std::move(plan);
    }
};

constexpr int MOST_OPS = 32;
Op *const ops = new Op[MOST_OPS];  // never freed: threads may still call them while the process ends

// The call of this thread that Python runs because it has no plan.
struct Pending {
    Op *op = nullptr;
    Key key;
    int32_t device = 0;
};
thread_local Pending pending;

struct Learning {
    Learning(Op &op, const Key &key, int32_t device) { pending = {&op, key, device}; }
    ~Learning() { pending.op = nullptr; }
};

Tensor tensor_of(char kind, Value value) {
    if (kind == 't') return (Tensor)value;
    return kind == 'o' && value != 0 ? (Tensor) * (Value *)value : nullptr;
}

// Everything that a plan depends on. Returns the device's index.
int32_t describe(const Op &op, const Value *stack, Key &key) {
    int32_t device = -1;
    key.clear();
    for (size_t i = 0; i < op.arguments.size(); ++i) {
        const char kind = op.arguments[i];
        if (kind == 'b') key.push_back(stack[i] & 0xff);
        else if (kind == 'd') key.push_back((int32_t)stack[i]);
        else if (kind == 'n') key.push_back((int64_t)stack[i]);
        else if (kind == 's') {
            const char *text;
            size_t length;
            check(functions.string_data((void *)stack[i], &text), "torch_string_c_str");
            check(functions.string_length((void *)stack[i], &length), "torch_string_length");
            key.push_back((int64_t)length);
            for (size_t at = 0; at < length; ++at) key.push_back(text[at]);
        } else if (kind == 'l') {
            size_t length;
            check(functions.list_size((void *)stack[i], &length), "torch_list_size");
            key.push_back((int64_t)length);
            for (size_t at = 0; at < length; ++at) {
                Value item;
                check(functions.list_item((void *)stack[i], at, &item), "torch_list_get_item");
                key.push_back((int64_t)item);
            }
        } else {
            const Tensor tensor = tensor_of(kind, stack[i]);
            if (tensor == nullptr) {
                key.push_back(-1);
                continue;
            }
            int64_t dim, *sizes, *strides;
            int32_t dtype, own_device;
            void *address;
            functions.dim(tensor, &dim), functions.sizes(tensor, &sizes), functions.strides(tensor, &strides);
            functions.dtype(tensor, &dtype), functions.device_index(tensor, &own_device);
            functions.data_ptr(tensor, &address);
            if (device < 0) device = own_device;
            key.push_back(dim), key.push_back(dtype), key.push_back(own_device), key.push_back((uint64_t)address % 16);
            key.insert(key.end(), sizes, sizes + dim);
            key.insert(key.end(), strides, strides + dim);
        }
    }
    return device;
}

thread_local std::string failure;  // the message of the exception that Python raised last

// Consumes the arguments, also where it throws.
void run_in_python(Op &op, Value *stack) {
    failure.clear();
    if (functions.call_op(op.python.c_str(), "", stack, torch_version) != 0)
        throw std::runtime_error(failure.empty() ? op.python + " failed" : failure);
}

// Tensors of a call. Frees what it owns, unless `keep` has handed it out.
struct Tensors {
    std::vector<Tensor> owned;
    ~Tensors() {
        for (Tensor tensor : owned)
            if (tensor != nullptr) functions.delete_tensor(tensor);
    }
    void *allocate(const Buffer &buffer, int32_t device) {
        Tensor made;
        if (buffer.empty != nullptr) {
            check(functions.view(buffer.empty->made, (int64_t)buffer.sizes.size(), buffer.sizes.data(),
                                 buffer.strides.data(), 0, &made),
                  "aoti_torch__reinterpret_tensor");
            owned.push_back(made);
            return nullptr;
        }
        made = buffer.allocated(device);
        owned.push_back(made);
        void *address;
        check(functions.data_ptr(made, &address), "aoti_torch_get_data_ptr");
        return address;
    }
};

// Encodes a tensor map as tensor_map.py does.
void encode(const Argument &one, void *address, TensorMap &map) {
    const int type = one.size == 1 ? 0 : one.size == 2 ? 1 : one.size == 4 ? 2 : 4;  // unsigned integers
    const uint64_t sizes[2] = {(uint64_t)one.columns, (uint64_t)one.rows}, stride = one.stride * one.size;
    const uint32_t box[2] = {(uint32_t)one.width, (uint32_t)one.box}, step[2] = {1, 1};
    const int64_t row = one.size == 8 ? 0 : one.width * one.size;  // bytes of a box's row that are swizzled
    const int swizzle = row == 128 ? 3 : row == 64 ? 2 : row == 32 ? 1 : 0, promotion = one.size == 8 ? 0 : 3;
    check(functions.encode_map(&map, type, 2, address, sizes, &stride, box, step, 0, swizzle, promotion, 0),
          "cuTensorMapEncodeTiled");
}

void launch(const Launch &one, const std::vector<void *> &addresses, Stream stream) {
    const size_t count = one.arguments.size();
    uint64_t numbers[32];
    void *pointers[32];
    TensorMap maps[4];
    int used = 0;
    for (size_t i = 0; i < count; ++i) {
        const Argument &argument = one.arguments[i];
        pointers[i] = &numbers[i];
        if (argument.kind == Argument::MAP) {
            encode(argument, (char *)addresses[argument.tensor] + argument.number, maps[used]);
            pointers[i] = &maps[used++];
        } else if (argument.kind == Argument::ADDRESS) {
            const uint64_t address = (uint64_t)addresses[argument.tensor];
            numbers[i] = address == 0 ? 0 : address + argument.number;
        } else numbers[i] = argument.number;
    }
    LaunchAttribute attributes[2] = {};
    unsigned given = 0;
    if (one.overlaps) {
        attributes[given].id = PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[given++].value.number = 1;
    }
    if (one.cluster > 1) {
        LaunchAttribute &cluster = attributes[given++];
        cluster.id = CLUSTER_DIMENSION;
        cluster.value.sizes[0] = one.cluster, cluster.value.sizes[1] = cluster.value.sizes[2] = 1;
    }
    const LaunchConfig config = {{one.grid, 1, 1}, {one.threads, 1, 1}, one.shared, stream, attributes, given};
    check(functions.launch(&config, one.function, pointers, nullptr), "cuLaunchKernelEx");
}

// An operand or the result of a product as a tensor, or the transpose of a matrix.
struct View {
    Tensor made = nullptr;
    View(const Part &of, const std::vector<Tensor> &tensors, bool transposed = false) {
        if (of.dim < 0) return;
        int32_t dtype;
        const Tensor base = tensors[of.tensor];
        check(functions.dtype(base, &dtype), "aoti_torch_get_dtype");
        int64_t sizes[2] = {of.sizes[0], of.sizes[1]}, strides[2] = {of.dim == 2 ? of.sizes[1] : 1, 1};
        if (transposed) std::swap(sizes[0], sizes[1]), std::swap(strides[0], strides[1]);
        const int64_t offset = of.offset / functions.element_size(dtype);
        check(functions.view(base, of.dim, sizes, strides, offset, &made), "aoti_torch__reinterpret_tensor");
    }
    View(const View &) = delete;
    ~View() {
        if (made != nullptr) functions.delete_tensor(made);
    }
};

void multiply(const CublasProduct &one, const std::vector<Tensor> &tensors) {
    const View a(one.a, tensors), b(one.b, tensors, true), a_scale(one.a_scale, tensors), b_scale(one.b_scale, tensors);
    View bias(one.bias, tensors);
    const View out(one.out, tensors);
    int32_t dtype;
    check(functions.dtype(out.made, &dtype), "aoti_torch_get_dtype");
    check(functions.scaled_mm(out.made, a.made, b.made, a_scale.made, b_scale.made,
                              bias.made == nullptr ? nullptr : &bias.made, nullptr, &dtype, 1),
          "aoti_torch_cuda__scaled_mm_out");
}

// Replaces the arguments by the results. Throws before that, for example where memory runs out.
void carry_out(const Op &op, const Plan &plan, Value *stack, int32_t device) {
    Stream stream;
    check(functions.current_stream(device, &stream), "aoti_torch_get_current_cuda_stream");
    Tensors made;
    std::vector<void *> addresses;
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < op.arguments.size(); ++i) {
        const char kind = op.arguments[i];
        if (kind != 't' && kind != 'o') continue;
        void *address = nullptr;
        const Tensor tensor = tensor_of(kind, stack[i]);
        if (tensor != nullptr) functions.data_ptr(tensor, &address);
        addresses.push_back(address), tensors.push_back(tensor);
    }
    for (const auto *buffers : {&plan.results, &plan.scratch}) {
        for (const Buffer &buffer : *buffers) {
            addresses.push_back(made.allocate(buffer, device)), tensors.push_back(made.owned.back());
            const uint64_t address = (uint64_t)addresses.back();
            if (buffer.filled > 0 && buffer.word == 0)
                check(functions.set_bytes(address, 0, buffer.filled, stream), "cuMemsetD8Async");
            else if (buffer.filled > 0)
                check(functions.set_words(address, buffer.word, buffer.filled / 4, stream), "cuMemsetD32Async");
        }
    }
    for (const Launch &one : plan.launches) {
        if (one.is_product) multiply(one.product, tensors);
        else launch(one, addresses, stream);
    }
    for (size_t i = 0; i < op.arguments.size(); ++i) {
        const char kind = op.arguments[i];
        if (const Tensor tensor = tensor_of(kind, stack[i])) functions.delete_tensor(tensor);
        if (kind == 'o' && stack[i] != 0) delete (Value *)stack[i];
        if (kind == 's') functions.delete_string((void *)stack[i]);
        if (kind == 'l') functions.delete_list((void *)stack[i]);
    }
    for (size_t i = 0; i < plan.results.size(); ++i) stack[i] = (Value)std::exchange(made.owned[i], nullptr);
}

// Whether the current context is this device's. A thread without any, such as autograd's before its first use of CUDA,
// gets the primary context of torch's current device, which torch uses too.
bool is_current(int32_t device) {
    int current;
    if (functions.current_device(&current) == 0) return current == device;
    int32_t wanted;
    if (functions.torch_device(&wanted) != 0 || wanted != device) return false;
    void *context;
    if (functions.retain_context(&context, device) != 0) return false;
    const bool is_set = functions.set_context(context) == 0;
    functions.release_context(device);  // torch keeps the context
    return is_set;
}

void call(Op &op, Value *stack) {
    if (*listeners != 0) return run_in_python(op, stack);
    thread_local Key key;
    const int32_t device = describe(op, stack, key);
    const auto plan = op.find(key);
    if (plan == nullptr) {
        const Learning learning(op, key, device);
        return run_in_python(op, stack);
    }
    // A kernel belongs to its device's context.
    if (plan->in_python || !is_current(device)) return run_in_python(op, stack);
    try {
        carry_out(op, *plan, stack, device);
        return;
    } catch (const std::exception &) {  // the arguments are still there
    }
    run_in_python(op, stack);  // raises Python's exception, if it fails too
}

template <int I>
void boxed(Value *stack, uint64_t, uint64_t) {
    call(ops[I], stack);
}

template <int... I>
void *boxed_of(int index, std::integer_sequence<int, I...>) {
    static void (*const all[])(Value *, uint64_t, uint64_t) = {boxed<I>...};
    return (void *)all[index];
}

}  // namespace

// ---- for launcher.py ---------------------------------------------------------------------------------------------------

extern "C" void set_up(const void *const *addresses, uint64_t version, int32_t device, const int32_t *flag) {
    void **to = (void **)&functions;
    for (size_t i = 0; i < sizeof(Functions) / sizeof(void *); ++i) to[i] = (void *)addresses[i];
    torch_version = version, device_type = device, listeners = flag;
}

// The kernel of the op with this number, for torch's dispatcher; null from MOST_OPS on.
extern "C" void *kernel_of(int number, const char *python, const char *arguments) {
    if (number >= MOST_OPS) return nullptr;
    ops[number].python = python;
    ops[number].arguments = arguments;
    return boxed_of(number, std::make_integer_sequence<int, MOST_OPS>());
}

// Enters the plan of the call that this thread runs in Python, if it is one of this op. Returns whether it did.
extern "C" int learn(int number, const int64_t *plan) {
    if (pending.op != &ops[number]) return 0;
    ops[number].enter(pending.key, Reader{plan, pending.device}.plan());
    pending.op = nullptr;
    return 1;
}

// The message of the exception that Python raises in the call that this thread runs in Python.
extern "C" void tell(const char *message) { failure = message; }

extern "C" int64_t plans_of(int number) {
    std::shared_lock lock(ops[number].mutex);
    return (int64_t)ops[number].plans.size();
}
