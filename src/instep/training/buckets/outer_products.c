/* A few rows' outer products, added up: the module _outer_products, which weight_factors.py calls.
 *
 * The product is (rows of the sum, width), of (terms, ...) and (terms, width), of which there are
 * few: a BLAS, which is made for many, takes up to twice as long.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "../vectorized.h"

typedef Py_ssize_t Size;

enum { LANES = 16, TILE = 6, BLOCK = 256 }; /* a block of a few terms stays in the L1 cache */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Some rows of the sum, LANES columns wide, in registers. */
#define ADD_UP(count) \
    do { \
        Vector sums[count] = {0}; \
        for (Size k = 0; k < terms; k++) { \
            const Vector factor = *(const Vector *)(right + k * width + column); \
            for (int i = 0; i < count; i++) \
                sums[i] += factor * left[k * stride + row + i]; \
        } \
        for (int i = 0; i < count; i++) \
            *(Vector *)(out + (row + i) * width + column) = sums[i]; \
    } while (0)

FOR_EACH_PROCESSOR
static void add_products(
    const float *restrict left, Size stride, const float *restrict right, Size terms, Size width,
    Size rows, float *restrict out)
{
    const Size whole = width / LANES * LANES;
    for (Size begin = 0; begin < whole; begin += BLOCK) {
        const Size end = begin + BLOCK < whole ? begin + BLOCK : whole;
        Size row = 0;
        for (; row + TILE <= rows; row += TILE)
            for (Size column = begin; column < end; column += LANES)
                ADD_UP(TILE);
        for (; row < rows; row++)
            for (Size column = begin; column < end; column += LANES)
                ADD_UP(1);
    }
    for (Size row = 0; row < rows; row++)
        for (Size column = whole; column < width; column++) {
            float sum = 0;
            for (Size k = 0; k < terms; k++)
                sum += left[k * stride + row] * right[k * width + column];
            out[row * width + column] = sum;
        }
}

/* add_products(left, stride, right, terms, width, rows, out) */
static PyObject *python_add_products(PyObject *module, PyObject *const *given, Size count)
{
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "7 arguments, not %zd", count);
    const float *left = PyLong_AsVoidPtr(given[0]), *right = PyLong_AsVoidPtr(given[2]);
    Size stride = PyLong_AsSsize_t(given[1]), terms = PyLong_AsSsize_t(given[3]);
    Size width = PyLong_AsSsize_t(given[4]), rows = PyLong_AsSsize_t(given[5]);
    float *out = PyLong_AsVoidPtr(given[6]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    add_products(left, stride, right, terms, width, rows, out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"add_products", (PyCFunction)(void (*)(void))python_add_products, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_outer_products", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__outer_products(void)
{
    return PyModule_Create(&definition);
}
