// Reads where the tensors of a Python list are, and how they are laid out, and checks that the tensors in Python dicts are
// where they were, for tensor_memory.py. Callers hold the GIL.
//
// torch describes a tensor by a C function of the DLPack exchange API (dlpack.h, DLPackExchangeAPI), whose structs are
// stable, or by one of its stable C functions for AOTInductor. The addresses of these functions and of Python's are given.

#include <stdint.h>

namespace {

struct Description {  // DLTensor
    char *data;
    int32_t device_type, device_index;
    int32_t dim;
    uint32_t dtype;  // code, bits and lanes
    const int64_t *sizes, *strides;
    uint64_t offset;
};

bool is_contiguous(const Description &tensor) {
    int64_t expected = 1;
    bool dense = true;
    for (int i = tensor.dim - 1; i >= 0; --i) {
        if (tensor.sizes[i] == 0) return true;
        if (tensor.sizes[i] == 1) continue;
        dense &= tensor.strides[i] == expected;
        expected *= tensor.sizes[i];
    }
    return dense;
}

}  // namespace

// Writes the address of each tensor to `addresses`, and to `layouts`, as far as there is `room`, three words a tensor and
// its sizes. Returns how many words the layouts have, or -1 with a Python exception for an object that torch does not
// describe.
extern "C" int64_t read(int (*describe)(void *, Description *), void *(*item)(void *, intptr_t), void *list, int64_t count,
                        int64_t *addresses, int64_t *layouts, int64_t room, int32_t *all_contiguous) {
    int64_t words = 0;
    const auto write = [&](int64_t word) {
        if (words < room) layouts[words] = word;
        ++words;
    };
    *all_contiguous = 1;
    for (int64_t i = 0; i < count; ++i) {
        Description tensor;
        void *const object = item(list, i);
        if (object == nullptr || describe(object, &tensor) != 0) return -1;
        addresses[i] = (int64_t)(tensor.data + tensor.offset);
        write(tensor.dtype);
        write((int64_t)tensor.device_type << 32 | (uint32_t)tensor.device_index);
        write(tensor.dim);
        for (int j = 0; j < tensor.dim; ++j) write(tensor.sizes[j]);
        if (!is_contiguous(tensor)) *all_contiguous = 0;
    }
    return words;
}

// `MemoryWatch` of tensor_memory.py: its fields, in this order.
struct Watched {
    int (*next)(void *, intptr_t *, void **, void **);  // PyDict_Next
    void *(*attribute)(void *, void *);                 // PyObject_GetAttr
    void (*release)(void *);                            // Py_DecRef
    int (*address)(const void *, void **);              // aoti_torch_get_data_ptr
    int64_t dicts, values, names;
    const uint8_t *is_watched;    // of each dict
    const uint8_t *kinds;         // of each value of these dicts: whether it is something else, a tensor, or around others
    void *const *objects;         // the values
    void *const *name;            // the attributes of a tensor that is around others
    void *const *inner;           // these attributes, in the order of the values
    const void *const *handles;   // torch's objects of all tensors with memory
    void *const *addresses;
};

// Whether a dict of dicts holds these values, and all tensors are at these addresses; -1 with a Python exception.
extern "C" int unchanged(const Watched &watched, void *owner) {
    int64_t dict = 0, value = 0, tensor = 0, inner = 0;
    intptr_t outer_place = 0;
    void *key, *own, *object;
    for (; watched.next(owner, &outer_place, &key, &own); ++dict) {
        if (dict == watched.dicts) return 0;
        if (!watched.is_watched[dict]) continue;
        for (intptr_t place = 0; watched.next(own, &place, &key, &object); ++value) {
            if (value == watched.values || watched.objects[value] != object) return 0;
            if (watched.kinds[value] == 2)
                for (int64_t i = 0; i < watched.names; ++i, ++inner) {
                    void *const found = watched.attribute(object, watched.name[i]);
                    if (found == nullptr) return -1;
                    watched.release(found);  // still referred to by `object`
                    if (found != watched.inner[inner]) return 0;
                }
            for (int64_t i = watched.kinds[value] == 2 ? watched.names : watched.kinds[value]; i > 0; --i, ++tensor) {
                void *address;
                // A handle is the address of a tensor, which is a pointer to torch's object.
                if (watched.address(&watched.handles[tensor], &address) != 0) return 0;
                if (address != watched.addresses[tensor]) return 0;
            }
        }
    }
    return dict == watched.dicts && value == watched.values;
}
