/* Zeros and ones as torch draws them on CPUs, for some elements of a tensor: the module
 * _mersenne_twister, which bernoulli.py calls.
 *
 * torch's generator is the Mersenne Twister (Matsumoto and Nishimura 1998). Its numbers come one
 * after the other, so those of other elements must be passed over, which costs a fraction of
 * drawing them: only the words that are used are tempered and compared.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#include "../vectorized.h"

enum { LENGTH = 624, DISTANCE = 397 };

typedef Py_ssize_t Size;

/* How torch.Generator.get_state() begins on a CPU. */
typedef struct {
    uint64_t seed;
    int32_t left; /* words until the next twist, and one more */
    int32_t is_seeded;
    uint64_t next;
    uint64_t words[LENGTH];
} State;

static inline uint32_t twisted(uint32_t far, uint32_t word, uint32_t following)
{
    uint32_t mixed = (word & 0x80000000u) | (following & 0x7fffffffu);
    return far ^ (mixed >> 1) ^ ((0u - (following & 1u)) & 0x9908b0dfu);
}

FOR_EACH_PROCESSOR
static void twist(uint32_t *words)
{
    int i = 0;
    for (; i < LENGTH - DISTANCE; i++)
        words[i] = twisted(words[i + DISTANCE], words[i], words[i + 1]);
    for (; i < LENGTH - 1; i++)
        words[i] = twisted(words[i + DISTANCE - LENGTH], words[i], words[i + 1]);
    words[i] = twisted(words[DISTANCE - 1], words[i], words[0]);
}

static inline uint32_t tempered(uint32_t word)
{
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

/* Whether the 53 lower bits of the number of these two words are less than `limit`. */
static inline float is_less(uint32_t upper, uint32_t lower, uint32_t upper_limit, uint32_t limit)
{
    uint32_t bits = tempered(upper) & 0x1fffffu;
    return (bits < upper_limit) | ((bits == upper_limit) & (tempered(lower) < limit));
}

FOR_EACH_PROCESSOR
static void compare(
    const uint32_t *restrict words, Size count, uint32_t upper_limit, uint32_t limit,
    float *restrict out)
{
    for (Size i = 0; i < count; i++)
        out[i] = is_less(words[2 * i], words[2 * i + 1], upper_limit, limit);
}

/* Go on by `count` elements, of two words each, and write them to `out` unless that is NULL. */
static void draw(uint32_t *words, Size *next, Size count, uint64_t limit, float *out)
{
    const uint32_t upper_limit = limit >> 32, lower_limit = limit;
    while (count > 0) {
        if (*next == LENGTH) {
            twist(words);
            *next = 0;
        }
        if (*next == LENGTH - 1) { /* the second word is of the next round */
            uint32_t upper = words[LENGTH - 1];
            twist(words);
            *next = 1;
            if (out)
                *out++ = is_less(upper, words[0], upper_limit, lower_limit);
            count--;
            continue;
        }
        Size here = (LENGTH - *next) / 2;
        if (here > count)
            here = count;
        if (out) {
            compare(words + *next, here, upper_limit, lower_limit, out);
            out += here;
        }
        *next += 2 * here;
        count -= here;
    }
}

/* draw_ones(state, passed, count, limit, out) */
static PyObject *python_draw_ones(PyObject *module, PyObject *const *given, Size arguments)
{
    uint32_t words[LENGTH];
    if (arguments != 5)
        return PyErr_Format(PyExc_TypeError, "5 arguments, not %zd", arguments);
    State *state = PyLong_AsVoidPtr(given[0]);
    Size passed = PyLong_AsSsize_t(given[1]), count = PyLong_AsSsize_t(given[2]);
    uint64_t limit = PyLong_AsUnsignedLongLong(given[3]);
    float *out = PyLong_AsVoidPtr(given[4]);
    if (PyErr_Occurred())
        return NULL;
    Size next = LENGTH - (state->left - 1);
    if (next < 0 || next > LENGTH || (state->left > 1 && state->next != (uint64_t)next))
        return PyErr_Format(PyExc_ValueError, "no state of torch's generator");
    for (int i = 0; i < LENGTH; i++)
        words[i] = state->words[i];
    draw(words, &next, passed, limit, NULL);
    draw(words, &next, count, limit, out);
    for (int i = 0; i < LENGTH; i++)
        state->words[i] = words[i];
    state->left = LENGTH - next + 1;
    state->next = next;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"draw_ones", (PyCFunction)(void (*)(void))python_draw_ones, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_mersenne_twister", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__mersenne_twister(void)
{
    return PyModule_Create(&definition);
}
