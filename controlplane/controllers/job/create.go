package job

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// create makes n pods in batches of 1, 2, 4, ...: when they are refused (by
// a quota, say), few attempts are wasted. indexes has one for each pod of an
// indexed Job; last the failed pod that one replaces.
func (r *round) create(ctx context.Context, n int, indexes []int32, last map[int32]*member) error {
	lost := r.unreplaced()
	for done, batch := 0, 1; done < n; batch *= 2 {
		first := done
		batch = min(batch, n-done)
		done += batch
		err := loop.Parallel(ctx, batch, func(ctx context.Context, i int) error {
			pod := newPod(r.job)
			k := first + i
			if indexed(r.job) {
				setIndex(r.job, pod, indexes[k], last[indexes[k]])
			} else if k < len(lost) {
				annotate(pod, replacesAnnotation, lost[k])
			}
			obj, err := r.c.env.Store.Create(ctx, pod, r.c.env.Write())
			switch {
			case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
				return nil
			case err != nil:
				if ctx.Err() == nil {
					r.note(events.Warning, "FailedCreate", "Error creating: %v", err)
				}
				return fmt.Errorf("create pod: %w", err)
			}
			if m, ok := obj.(metav1.Object); ok {
				r.note(events.Normal, "SuccessfulCreate", "Created pod: %s", m.GetName())
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unreplaced are the uids of lost pods that no other pod stands in for.
func (r *round) unreplaced() (out []string) {
	has := map[string]bool{}
	for i := range r.pods {
		if c := r.pods[i].class; c == active || c == succeeded || c == missing {
			has[r.pods[i].replaces] = true
		}
	}
	for i := range r.pods {
		if m := &r.pods[i]; m.class == missing && !has[m.uid] && !m.unwanted {
			out = append(out, m.uid)
		}
	}
	return out
}

func annotate(p *corev1.Pod, key, value string) {
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[key] = value
}

func newPod(j *batchv1.Job) *corev1.Pod {
	t := j.Spec.Template.DeepCopy()
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: prefix(j.Name, "-"), Namespace: j.Namespace, Labels: t.Labels, Annotations: t.Annotations,
			Finalizers:      append(t.Finalizers, batchv1.JobTrackingFinalizer),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(j, gvk)},
		},
		Spec: t.Spec,
	}
}

// prefix keeps room for the random end of a name of 63 characters.
func prefix(name, end string) string { return name[:min(len(name), 58-len(end))] + end }

// setIndex makes the pod that of one index.
func setIndex(j *batchv1.Job, p *corev1.Pod, index int32, replaced *member) {
	n := strconv.Itoa(int(index))
	annotate(p, batchv1.JobCompletionIndexAnnotation, n)
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[batchv1.JobCompletionIndexAnnotation] = n
	p.GenerateName = prefix(j.Name, "-"+n+"-")
	p.Spec.Hostname = j.Name + "-" + n
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			list[i].Env = withIndex(list[i].Env)
		}
	}
	if !perIndex(j) {
		return
	}
	failures, ignored := int32(0), int32(0)
	if replaced != nil {
		if failures, ignored = replaced.failures, replaced.ignored; replaced.counts {
			failures++
		} else {
			ignored++
		}
	}
	annotate(p, batchv1.JobIndexFailureCountAnnotation, strconv.Itoa(int(failures)))
	if ignored > 0 {
		annotate(p, batchv1.JobIndexIgnoredFailureCountAnnotation, strconv.Itoa(int(ignored)))
	}
}

const indexVariable = "JOB_COMPLETION_INDEX"

func withIndex(env []corev1.EnvVar) []corev1.EnvVar {
	for i := range env {
		if env[i].Name == indexVariable {
			return env
		}
	}
	return append(env, corev1.EnvVar{Name: indexVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.labels['" + batchv1.JobCompletionIndexAnnotation + "']"}}})
}

// lastFailed finds, for each index, the failed pod with the most failures
// that is still here: the next one carries its count on.
func lastFailed(pods []member) map[int32]*member {
	out := map[int32]*member{}
	for i := range pods {
		m := &pods[i]
		if m.class != failed || m.index == none || !m.tracked || m.unwanted {
			continue
		}
		if o := out[m.index]; o == nil || o.failures+o.ignored < m.failures+m.ignored {
			out[m.index] = m
		}
	}
	return out
}

// backoffs remembers, on the monotonic clock, when pods failed. It begins
// anew with each leader. Bounded by the Jobs that are not finished.
type backoffs struct {
	mu   sync.Mutex
	jobs map[state.Key]*backoff
}

type backoff struct {
	failures int32 // since the last success
	last     time.Time
	seen     map[string]time.Time // when a failed pod was first seen
}

const (
	backoffBase = 10 * time.Second
	backoffMax  = 10 * time.Minute
)

func newBackoffs() *backoffs { return &backoffs{jobs: map[state.Key]*backoff{}} }

func (b *backoffs) of(key state.Key) *backoff {
	x := b.jobs[key]
	if x == nil {
		x = &backoff{seen: map[string]time.Time{}}
		b.jobs[key] = x
	}
	return x
}

// observe takes the pods that have ended and were not seen so before.
func (b *backoffs) observe(key state.Key, pods []member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.of(key)
	if len(x.seen) > 4*burst {
		clear(x.seen)
	}
	failures := int32(0)
	for i := range pods {
		m := &pods[i]
		if _, known := x.seen[m.uid]; known || !m.tracked {
			continue
		}
		switch {
		case m.class == succeeded:
			x.failures = 0
		case m.class == failed && m.counts:
			failures++
		default:
			continue
		}
		x.seen[m.uid] = time.Now()
	}
	if failures > 0 {
		x.failures, x.last = x.failures+failures, time.Now()
	}
}

// delay after so many failures.
func delay(failures int32) time.Duration {
	if failures <= 0 {
		return 0
	}
	return min(backoffBase<<min(failures-1, 10), backoffMax)
}

// left until the Job may make a pod.
func (b *backoffs) left(key state.Key) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.jobs[key]
	if x == nil {
		return 0
	}
	return delay(x.failures) - time.Since(x.last)
}

// leftOf is left for one index, whose last pod failed for the n-th time.
func (b *backoffs) leftOf(key state.Key, uid string, n int32) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.of(key)
	at, ok := x.seen[uid]
	if !ok {
		at = time.Now()
		x.seen[uid] = at
	}
	return delay(n) - time.Since(at)
}

func (b *backoffs) forget(key state.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.jobs, key)
}
