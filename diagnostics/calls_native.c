/* Writes the events of a call trace from C: about 0.1 us for each. calls_native.py compiles and loads it.

   Up to Python 3.11, `profile` is a profile function of every thread; from 3.12 on, `enter` and `leave` are callbacks of
   sys.monitoring. Both ask Python once for each code object what its number is (0: not traced) and keep the answer in
   the code object. Everything below runs with the GIL held. Layout of a lane: calls_file.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <stdint.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "this Python has no GIL, which the tables below rely on"
#endif

#if PY_VERSION_HEX >= 0x030C0000
#define get_extra PyUnstable_Code_GetExtra
#define set_extra PyUnstable_Code_SetExtra
#define request_extra PyUnstable_Eval_RequestCodeExtraIndex
#else
#define get_extra _PyCode_GetExtra
#define set_extra _PyCode_SetExtra
#define request_extra _PyEval_RequestCodeExtraIndex
#endif

#define LANE_HEADER 64
#define EVENT_BYTES 16
#define COUNT_AT 8
#define LEAVE (UINT32_C(1) << 30)

typedef struct {
    unsigned char *base; /* NULL: this thread has no lane, and gets none in this epoch */
    uint64_t count, size;
    uint32_t epoch;
    Py_buffer view;
} Lane;

static __thread Lane lane;
static uint32_t epoch = 1;      /* of lanes: a new trace and a forked child begin with new ones */
static uint32_t generation = 1; /* of numbers: a new trace has others */
static Py_ssize_t extra_index = -1;
static PyObject *number_of_code = NULL; /* (code, frame) -> number */
static PyObject *make_lane = NULL;      /* () -> writable buffer, or None */
static PyObject *not_again = NULL;      /* sys.monitoring.DISABLE */

static int open_lane(void) {
    lane.epoch = epoch;
    lane.base = NULL; /* an earlier view is kept: its memory must stay mapped while another trace might be read */
    PyObject *memory = PyObject_CallObject(make_lane, NULL);
    if (memory == NULL) {
        PyErr_Clear();
        return 0;
    }
    if (memory != Py_None && PyObject_GetBuffer(memory, &lane.view, PyBUF_WRITABLE) == 0) {
        lane.base = lane.view.buf;
        lane.count = 0;
        lane.size = (lane.view.len - LANE_HEADER) / EVENT_BYTES;
    }
    PyErr_Clear();
    Py_DECREF(memory);
    return lane.base != NULL;
}

static void record(uint32_t what) {
    if (lane.epoch != epoch ? !open_lane() : lane.base == NULL)
        return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t moment = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    unsigned char *at = lane.base + LANE_HEADER + lane.count % lane.size * EVENT_BYTES;
    uint32_t check = (uint32_t)lane.count;
    memcpy(at, &moment, 8);
    memcpy(at + 8, &what, 4);
    memcpy(at + 12, &check, 4);
    lane.count++;
    memcpy(lane.base + COUNT_AT, &lane.count, 8);
}

static uint32_t ask_number(PyObject *code) {
    /* The frame has the name of the module. To get it costs a little, so it is not done for each event. */
    PyObject *answer = PyObject_CallFunctionObjArgs(number_of_code, code, PyEval_GetFrame(), NULL);
    uint32_t number = answer == NULL ? 0 : (uint32_t)PyLong_AsUnsignedLong(answer);
    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        number = 0;
    }
    /* Asking may have begun the trace, and with it a new generation of numbers. */
    set_extra(code, extra_index, (void *)((uintptr_t)generation << 32 | number));
    return number;
}

static inline uint32_t number_for(PyObject *code) {
    void *known = NULL;
    get_extra(code, extra_index, &known);
    if ((uint32_t)((uintptr_t)known >> 32) == generation)
        return (uint32_t)(uintptr_t)known;
    return ask_number(code);
}

#if PY_VERSION_HEX < 0x030C0000

static int profile(PyObject *Py_UNUSED(object), PyFrameObject *frame, int what, PyObject *Py_UNUSED(argument)) {
    if (what != PyTrace_CALL && what != PyTrace_RETURN)
        return 0;
#if PY_VERSION_HEX < 0x03090000
    PyObject *code = (PyObject *)frame->f_code;
#else
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    Py_DECREF(code); /* the frame holds it */
#endif
    uint32_t number = number_for(code);
    if (number)
        record(what == PyTrace_CALL ? number : number | LEAVE);
    return 0;
}

/* Make `profile` the profile function of this thread (`all`: of every thread) that has none; return how many threads
   have one of their own. */
static PyObject *begin_profile(PyObject *self, PyObject *all) {
    long num_others = 0;
#if PY_VERSION_HEX < 0x03090000 /* can set it for this thread only */
    (void)all;
    PyThreadState *here = PyThreadState_Get();
    if (here->c_profilefunc == NULL)
        PyEval_SetProfile(profile, self);
    else if (here->c_profilefunc != profile)
        num_others++;
#else
    PyThreadState *each = PyObject_IsTrue(all) ? PyInterpreterState_ThreadHead(PyInterpreterState_Get())
                                               : PyThreadState_Get();
    while (each != NULL) {
        if (each->c_profilefunc == NULL) {
            if (_PyEval_SetProfile(each, profile, self) < 0)
                return NULL;
        } else if (each->c_profilefunc != profile) {
            num_others++;
        }
        each = PyObject_IsTrue(all) ? PyThreadState_Next(each) : NULL;
    }
#endif
    return PyLong_FromLong(num_others);
}

static PyObject *end_profile(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored)) {
#if PY_VERSION_HEX < 0x03090000
    if (PyThreadState_Get()->c_profilefunc == profile)
        PyEval_SetProfile(NULL, NULL);
#else
    for (PyThreadState *each = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); each != NULL;
         each = PyThreadState_Next(each))
        if (each->c_profilefunc == profile && _PyEval_SetProfile(each, NULL, NULL) < 0)
            return NULL;
#endif
    Py_RETURN_NONE;
}

/* Whether this thread's profile function is ours: the program may have set its own. */
static PyObject *is_profiling(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(PyThreadState_Get()->c_profilefunc == profile);
}

#else

static PyObject *monitored(PyObject *const *arguments, Py_ssize_t count, uint32_t kind) {
    if (count < 1 || !PyCode_Check(arguments[0]))
        Py_RETURN_NONE;
    uint32_t number = number_for(arguments[0]);
    if (number) {
        record(number | kind);
        Py_RETURN_NONE;
    }
    return Py_NewRef(not_again);
}

static PyObject *enter(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t count) {
    return monitored(arguments, count, 0);
}

static PyObject *leave(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t count) {
    return monitored(arguments, count, LEAVE);
}

/* Python cannot switch off for a single function what an exception begins or ends. */
static PyObject *enter_by_throw(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t count) {
    Py_XDECREF(monitored(arguments, count, 0));
    Py_RETURN_NONE;
}

static PyObject *unwind(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t count) {
    Py_XDECREF(monitored(arguments, count, LEAVE));
    Py_RETURN_NONE;
}

#endif

static PyObject *set_up(PyObject *Py_UNUSED(self), PyObject *arguments) {
    PyObject *numbers, *lanes, *disable;
    if (!PyArg_ParseTuple(arguments, "OOO", &numbers, &lanes, &disable))
        return NULL;
    Py_INCREF(numbers), Py_INCREF(lanes), Py_INCREF(disable);
    Py_XDECREF(number_of_code), Py_XDECREF(make_lane), Py_XDECREF(not_again);
    number_of_code = numbers, make_lane = lanes, not_again = disable;
    if (extra_index < 0)
        extra_index = request_extra(NULL);
    if (extra_index < 0) {
        PyErr_SetString(PyExc_RuntimeError, "code objects have no room for a number");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *renumber(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored)) {
    generation++, epoch++;
    Py_RETURN_NONE;
}

static PyObject *mark(PyObject *Py_UNUSED(self), PyObject *what) {
    uint32_t value = (uint32_t)PyLong_AsUnsignedLong(what);
    if (PyErr_Occurred())
        return NULL;
    record(value);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_up", set_up, METH_VARARGS, NULL},
    {"renumber", renumber, METH_NOARGS, NULL},
    {"mark", mark, METH_O, NULL},
#if PY_VERSION_HEX < 0x030C0000
    {"begin_profile", begin_profile, METH_O, NULL},
    {"end_profile", end_profile, METH_NOARGS, NULL},
    {"is_profiling", is_profiling, METH_NOARGS, NULL},
#else
    {"enter", (PyCFunction)(void (*)(void))enter, METH_FASTCALL, NULL},
    {"leave", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, NULL},
    {"enter_by_throw", (PyCFunction)(void (*)(void))enter_by_throw, METH_FASTCALL, NULL},
    {"unwind", (PyCFunction)(void (*)(void))unwind, METH_FASTCALL, NULL},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "calls_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_calls_native(void) { return PyModule_Create(&module); }
