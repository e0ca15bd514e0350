package controllers

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/kubernetes/pkg/controller/ttlafterfinished"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/job"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// lifeCase is a Job with a time to live, which is changed later on.
type lifeCase struct {
	ttl, changed *int32
	at           time.Duration // when it is changed
	end          batchv1.JobConditionType
	ago          time.Duration // when the Job ended
}

func newLifeCase(seed uint64) lifeCase {
	d := roll(seed)
	ttl := func() *int32 {
		if d.odds(5) {
			return nil
		}
		n := oneOf[int32](d, 0, 1, 30, 60, 100, 3600)
		return &n
	}
	c := lifeCase{ttl: ttl(), changed: ttl(), at: time.Duration(1+d.r.IntN(200)) * time.Second, ago: time.Duration(d.r.IntN(100)) * time.Second,
		end: oneOf(d, batchv1.JobComplete, batchv1.JobFailed, batchv1.JobComplete, batchv1.JobFailed, "")}
	if c.ttl != nil && *c.ttl > 0 && c.changed != nil && *c.changed > 0 && d.odds(5) {
		c.ago = -c.ago // by a clock that was wrong; without a time to live Dunlin does not wait for it
	}
	return c
}

func (c lifeCase) String() string {
	n := func(p *int32) string {
		if p == nil {
			return "none"
		}
		return fmt.Sprint(*p)
	}
	return fmt.Sprintf("ttl %s, %s after %s, ended %q %s ago", n(c.ttl), n(c.changed), c.at, c.end, c.ago)
}

func (c lifeCase) finish(st *batchv1.JobStatus, now time.Time) {
	at, began := metav1.NewTime(now.Add(-c.ago)), metav1.NewTime(now.Add(-time.Hour))
	st.StartTime = &began
	switch c.end {
	case batchv1.JobComplete:
		st.CompletionTime, st.Succeeded = &at, 1
		st.Conditions = append(st.Conditions, batchv1.JobCondition{Type: batchv1.JobSuccessCriteriaMet, Status: corev1.ConditionTrue, LastTransitionTime: began})
	case batchv1.JobFailed:
		st.Conditions = append(st.Conditions, batchv1.JobCondition{Type: batchv1.JobFailureTarget, Status: corev1.ConditionTrue, LastTransitionTime: began})
	case "":
		return
	}
	st.Conditions = append(st.Conditions, batchv1.JobCondition{Type: c.end, Status: corev1.ConditionTrue, Reason: "x", LastTransitionTime: at})
}

const lifeWatched = 2 * time.Hour

// ours is when Dunlin deletes the Job; -1 if it does not.
func (c lifeCase) ours(t *testing.T) time.Duration {
	w := fixture.New(t)
	w.Advance(time.Now().Sub(w.Now()))
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "j"}, Spec: batchv1.JobSpec{Template: fixture.Template("j"), TTLSecondsAfterFinished: c.ttl}}
	j.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	w.Create(j)
	fixture.Change(w, jobKind, "default", "j", registry.Status, func(j *batchv1.Job) { c.finish(&j.Status, w.Now()) })
	ctl, key := job.New(w.Env()), state.Key{Kind: jobKind.String(), Namespace: "default", Name: "j"}
	begin, changed := time.Now(), false
	for range 1000 {
		wait, err := ctl.Reconcile(context.Background(), key)
		if err != nil {
			t.Fatal(err)
		}
		got := fixture.Get[*batchv1.Job](w, jobKind, "default", "j")
		if got.DeletionTimestamp != nil {
			if len(got.Finalizers) != 1 || got.Finalizers[0] != metav1.FinalizerDeleteDependents {
				t.Errorf("%s: not deleted in the foreground: %v", c, got.Finalizers)
			}
			return time.Since(begin)
		}
		gone := time.Since(begin)
		if !changed && (wait == 0 || gone+wait > c.at) {
			wait = c.at - gone
		}
		if wait == 0 || gone+wait > lifeWatched {
			return -1
		}
		time.Sleep(wait)
		w.Advance(wait)
		if !changed && time.Since(begin) == c.at {
			changed = true
			fixture.Change(w, jobKind, "default", "j", registry.Main, func(j *batchv1.Job) { j.Spec.TTLSecondsAfterFinished = c.changed })
		}
	}
	t.Fatalf("%s: it looks again and again", c)
	return -1
}

// theirs is when upstream does.
func (c lifeCase) theirs(t *testing.T) time.Duration {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "j", UID: "j"}, Spec: batchv1.JobSpec{TTLSecondsAfterFinished: c.ttl}}
	c.finish(&j.Status, time.Now())
	client := fake.NewClientset(j)
	deleted, begin := time.Duration(-1), time.Now()
	client.PrependReactor("delete", "jobs", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if deleted < 0 {
			deleted = time.Since(begin)
		}
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(context.Background())
	factory := informers.NewSharedInformerFactory(client, 0)
	ctl := ttlafterfinished.New(ctx, factory.Batch().V1().Jobs(), client)
	factory.Start(ctx.Done())
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctl.Run(ctx, 1)
	}()
	time.Sleep(c.at)
	synctest.Wait()
	if deleted < 0 {
		j = j.DeepCopy()
		j.Spec.TTLSecondsAfterFinished = c.changed
		if _, err := client.BatchV1().Jobs("default").Update(ctx, j, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(lifeWatched - c.at)
	synctest.Wait()
	cancel()
	<-done
	factory.Shutdown()
	return deleted
}

// A finished Job is deleted at the same moment, whatever its time to live is
// and was changed to; one that is not finished never is.
func TestTimeToLive(t *testing.T) {
	deleted := 0
	for seed := range uint64(300) {
		c := newLifeCase(seed)
		var got, want time.Duration
		synctest.Test(t, func(t *testing.T) { got = c.ours(t) })
		synctest.Test(t, func(t *testing.T) { want = c.theirs(t) })
		if got.Round(time.Second) != want.Round(time.Second) {
			t.Errorf("seed %d: %s: dunlin after %s, upstream after %s", seed, c, got, want)
		}
		if want >= 0 {
			deleted++
		}
	}
	if deleted < 100 {
		t.Errorf("%d Jobs are deleted: the cases do not try it", deleted)
	}
}
