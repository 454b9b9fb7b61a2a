/* Batch normalisation of float32 on one thread of a CPU: the module _cpu_kernels, which
 * cpu_kernels.py calls. kernels.py says what the functions compute.
 *
 * Input, gradients and output are contiguous and have the shape (rows, channels, size). Of each
 * channel there are `moments`, a mean and a sum of squared distances from it, and `statistics`, a
 * mean and a biased variance: first the means of all channels, then the others, then the number of
 * values in a channel. Weight and bias may be NULL.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>

#include "../vectorized.h"

typedef Py_ssize_t Size;

/* The moments of some rows. */
FOR_EACH_PROCESSOR
static void moments(
    const float *restrict input, Size rows, Size channels, Size size,
    double *restrict moments)
{
    double *mean = moments, *squares = moments + channels;
    const double count = (double)rows * size;
    for (Size c = 0; c < channels; c++) {
        /* Distances from one of the values: the difference of squares loses no more digits than
         * count has. */
        const double center = isfinite(input[c * size]) ? input[c * size] : 0;
        double sum = 0, sum_of_squares = 0;
        for (Size r = 0; r < rows; r++) {
            const float *restrict x = input + (r * channels + c) * size;
            for (Size i = 0; i < size; i++) {
                double distance = x[i] - center;
                sum += distance;
                sum_of_squares += distance * distance;
            }
        }
        mean[c] = center + sum / count;
        squares[c] = sum_of_squares - sum / count * sum;
    }
    moments[2 * channels] = count;
}

/* The statistics of all rows, from the moments of each shard. */
FOR_EACH_PROCESSOR
static void merge(
    const double *restrict moments, Size shards, Size channels, double *restrict statistics)
{
    double *mean = statistics, *var = statistics + channels;
    const Size row = 2 * channels + 1;
    double total = 0;
    for (Size s = 0; s < shards; s++)
        total += moments[s * row + 2 * channels];
    for (Size c = 0; c < channels; c++) {
        double weighted = 0, squares = 0;
        for (Size s = 0; s < shards; s++)
            weighted += moments[s * row + 2 * channels] * moments[s * row + c];
        mean[c] = weighted / total;
        for (Size s = 0; s < shards; s++) {
            double offset = moments[s * row + c] - mean[c];
            squares += moments[s * row + channels + c]
                + moments[s * row + 2 * channels] * offset * offset;
        }
        var[c] = squares / total;
    }
    statistics[2 * channels] = total;
}

/* Move the running statistics, either of which may be NULL, towards those of the batch. */
static void update_running(
    float *restrict running_mean, float *restrict running_var, Size channels,
    const double *restrict statistics, double momentum)
{
    const double *mean = statistics, *var = statistics + channels;
    const double count = statistics[2 * channels];
    const double unbiased = count > 1 ? count / (count - 1) : NAN;
    for (Size c = 0; c < channels && running_mean; c++)
        running_mean[c] += momentum * (mean[c] - running_mean[c]);
    for (Size c = 0; c < channels && running_var; c++)
        running_var[c] += momentum * (var[c] * unbiased - running_var[c]);
}

/* (input - mean) / sqrt(var + eps) * weight + bias. */
FOR_EACH_PROCESSOR
static void normalize(
    const float *restrict input, Size rows, Size channels, Size size,
    const double *restrict statistics, double eps,
    const float *restrict weight, const float *restrict bias, float *restrict output)
{
    const double *mean = statistics, *var = statistics + channels;
    for (Size c = 0; c < channels; c++) {
        const double slope = (weight ? weight[c] : 1) / sqrt(var[c] + eps);
        const float scale = slope, offset = (bias ? bias[c] : 0) - mean[c] * slope;
        for (Size r = 0; r < rows; r++) {
            const float *restrict x = input + (r * channels + c) * size;
            float *restrict y = output + (r * channels + c) * size;
            for (Size i = 0; i < size; i++)
                y[i] = x[i] * scale + offset;
        }
    }
}

/* Of each channel the sums of grad * x_hat and of grad, as `sums` and once more in float32. */
FOR_EACH_PROCESSOR
static void sums(
    const float *restrict grad, const float *restrict input, Size rows, Size channels, Size size,
    const double *restrict statistics, double eps,
    double *restrict sums, float *restrict weight_grad, float *restrict bias_grad)
{
    const double *mean = statistics, *var = statistics + channels;
    for (Size c = 0; c < channels; c++) {
        const double center = mean[c];
        double dot = 0, total = 0;
        for (Size r = 0; r < rows; r++) {
            const float *restrict g = grad + (r * channels + c) * size;
            const float *restrict x = input + (r * channels + c) * size;
            for (Size i = 0; i < size; i++) {
                dot += g[i] * (x[i] - center);
                total += g[i];
            }
        }
        sums[c] = dot / sqrt(var[c] + eps);
        sums[channels + c] = total;
        weight_grad[c] = sums[c];
        bias_grad[c] = total;
    }
}

/* scale * (grad - avg(grad) - x_hat * avg(grad * x_hat)): the averages are those of the values of
 * all shards, of each of which there are `sums`. */
FOR_EACH_PROCESSOR
static void input_gradient(
    const float *restrict grad, const float *restrict input, Size rows, Size channels, Size size,
    const double *restrict statistics, double eps,
    const float *restrict weight, const double *restrict sums, Size shards,
    float *restrict output)
{
    const double *mean = statistics, *var = statistics + channels;
    const double count = statistics[2 * channels];
    for (Size c = 0; c < channels; c++) {
        double dot = 0, total = 0;
        for (Size s = 0; s < shards; s++) {
            dot += sums[2 * s * channels + c];
            total += sums[2 * s * channels + channels + c];
        }
        const double inv_std = 1 / sqrt(var[c] + eps);
        const double slope = (weight ? weight[c] : 1) * inv_std;
        const double of_input = -slope * inv_std * dot / count;
        const float scale = slope, factor = of_input;
        const float offset = -slope * total / count - of_input * mean[c];
        for (Size r = 0; r < rows; r++) {
            const float *restrict g = grad + (r * channels + c) * size;
            const float *restrict x = input + (r * channels + c) * size;
            float *restrict y = output + (r * channels + c) * size;
            for (Size i = 0; i < size; i++)
                y[i] = g[i] * scale + (x[i] * factor + offset);
        }
    }
}

/* ---------------------------------------------------------------------------------- the module
 *
 * Tensors are given by the address of their values, or None. Numbers are bytes of doubles. */

typedef union {
    void *pointer;
    Size size;
    double number;
} Value;

#define MOST_ARGUMENTS 10

/* Arguments as `kinds` says: t, a tensor; b, bytes; n, a size; d, a float. */
static int are_read(PyObject *const *given, Size count, const char *kinds, Value *values)
{
    Size k = 0;
    for (; k < count && kinds[k]; k++) {
        if (kinds[k] == 'b')
            values[k].pointer = PyBytes_AsString(given[k]);
        else if (kinds[k] == 'n')
            values[k].size = PyLong_AsSsize_t(given[k]);
        else if (kinds[k] == 'd')
            values[k].number = PyFloat_AsDouble(given[k]);
        else
            values[k].pointer = given[k] == Py_None ? NULL : PyLong_AsVoidPtr(given[k]);
    }
    if (k != count || kinds[k])
        PyErr_SetString(PyExc_TypeError, "another number of arguments");
    return !PyErr_Occurred();
}

static PyObject *new_doubles(Size count)
{
    return PyBytes_FromStringAndSize(NULL, count * sizeof(double));
}

static double *doubles(PyObject *bytes)
{
    return (double *)PyBytes_AsString(bytes);
}

static Size rows_of(PyObject *bytes, Size width)
{
    return PyBytes_Size(bytes) / (width * sizeof(double));
}

/* moments(input, rows, channels, size) */
static PyObject *python_moments(PyObject *module, PyObject *const *given, Size count)
{
    Value v[MOST_ARGUMENTS];
    PyObject *found;
    if (!are_read(given, count, "tnnn", v) || !(found = new_doubles(2 * v[2].size + 1)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    moments(v[0].pointer, v[1].size, v[2].size, v[3].size, doubles(found));
    Py_END_ALLOW_THREADS
    return found;
}

/* merge(moments, channels) */
static PyObject *python_merge(PyObject *module, PyObject *const *given, Size count)
{
    Value v[MOST_ARGUMENTS];
    PyObject *found;
    if (!are_read(given, count, "bn", v) || !(found = new_doubles(2 * v[1].size + 1)))
        return NULL;
    merge(v[0].pointer, rows_of(given[0], 2 * v[1].size + 1), v[1].size, doubles(found));
    return found;
}

/* update_running(running_mean, running_var, channels, statistics, momentum) */
static PyObject *python_update_running(PyObject *module, PyObject *const *given, Size count)
{
    Value v[MOST_ARGUMENTS];
    if (!are_read(given, count, "ttnbd", v))
        return NULL;
    update_running(v[0].pointer, v[1].pointer, v[2].size, v[3].pointer, v[4].number);
    Py_RETURN_NONE;
}

/* normalize(input, rows, channels, size, statistics, eps, weight, bias, output) */
static PyObject *python_normalize(PyObject *module, PyObject *const *given, Size count)
{
    Value v[MOST_ARGUMENTS];
    if (!are_read(given, count, "tnnnbdttt", v))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    normalize(v[0].pointer, v[1].size, v[2].size, v[3].size, v[4].pointer, v[5].number,
        v[6].pointer, v[7].pointer, v[8].pointer);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* sums(grad, input, rows, channels, size, statistics, eps, weight_grad, bias_grad) */
static PyObject *python_sums(PyObject *module, PyObject *const *given, Size count)
{
    Value v[MOST_ARGUMENTS];
    PyObject *found;
    if (!are_read(given, count, "ttnnnbdtt", v) || !(found = new_doubles(2 * v[3].size)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sums(v[0].pointer, v[1].pointer, v[2].size, v[3].size, v[4].size, v[5].pointer, v[6].number,
        doubles(found), v[7].pointer, v[8].pointer);
    Py_END_ALLOW_THREADS
    return found;
}

/* input_gradient(grad, input, rows, channels, size, statistics, eps, weight, sums, output) */
static PyObject *python_input_gradient(PyObject *module, PyObject *const *given, Size count)
{
    Value v[MOST_ARGUMENTS];
    if (!are_read(given, count, "ttnnnbdtbt", v))
        return NULL;
    Size shards = rows_of(given[8], 2 * v[3].size);
    Py_BEGIN_ALLOW_THREADS
    input_gradient(v[0].pointer, v[1].pointer, v[2].size, v[3].size, v[4].size, v[5].pointer,
        v[6].number, v[7].pointer, v[8].pointer, shards, v[9].pointer);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))python_##name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    ENTRY(moments), ENTRY(merge), ENTRY(update_running),
    ENTRY(normalize), ENTRY(sums), ENTRY(input_gradient),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_cpu_kernels", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__cpu_kernels(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "INTERFACE", 2) < 0) /* changes with arguments */
        Py_CLEAR(module);
    return module;
}
