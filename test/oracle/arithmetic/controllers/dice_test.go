package controllers

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) {
	klog.SetLogger(klog.Logger{}) // upstream's controllers are talkative
	os.Exit(m.Run())
}

// cases is how many random ones each test compares; a case's number is its
// seed.
const cases = 1000

// dice are the random choices of one case.
type dice struct{ r *rand.Rand }

func roll(seed uint64) dice { return dice{rand.New(rand.NewPCG(seed, 1))} }

func (d dice) odds(of int) bool { return d.r.IntN(of) == 0 }

func oneOf[T any](d dice, of ...T) T { return of[d.r.IntN(len(of))] }

// share is a number of pods up to most, or a percentage.
func (d dice) share(most int) *intstr.IntOrString {
	v := intstr.FromInt32(int32(d.r.IntN(most + 1)))
	if d.odds(2) {
		v = intstr.FromString(strconv.Itoa(d.r.IntN(11)*10) + "%")
	}
	return &v
}

func zero(v *intstr.IntOrString) bool {
	return v.Type == intstr.Int && v.IntVal == 0 || v.StrVal == "0%"
}

func image(t *corev1.PodTemplateSpec, n int) {
	t.Spec.Containers[0].Image = fmt.Sprintf("r.example/a:%d", n)
}
