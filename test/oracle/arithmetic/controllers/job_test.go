package controllers

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	upstreamjob "k8s.io/kubernetes/pkg/controller/job"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/job"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// worked is what became of a Job and its pods, after its controller wanted
// nothing more and all pods that it deleted were gone.
type worked struct {
	job  *batchv1.Job
	pods []string // which there are, and what they carry on
}

func (c *jobCase) tell(pods []*corev1.Pod) (out []string) {
	known := map[types.UID]bool{}
	for _, p := range c.pods {
		known[p.UID] = true
	}
	for _, p := range pods {
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		text := p.Name
		if !known[p.UID] {
			text = "new"
		}
		for _, a := range []string{batchv1.JobCompletionIndexAnnotation, batchv1.JobIndexFailureCountAnnotation, batchv1.JobIndexIgnoredFailureCountAnnotation} {
			text += "/" + p.Annotations[a]
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return out
}

const lives = 4 // how often the controller works, and then the node

// ours is what Dunlin makes of the Job, and of it suspended or resumed again
// that often.
func (c *jobCase) ours(turns int) (out []worked) {
	ctl := job.New(c.w.Env())
	for i := range turns + 1 {
		if i > 0 {
			fixture.Change(c.w, jobKind, "default", "j", registry.Main, func(j *batchv1.Job) { *j.Spec.Suspend = !*j.Spec.Suspend })
		}
		out = append(out, c.work(ctl))
	}
	return out
}

func (c *jobCase) work(ctl *loop.Controller) worked {
	for range lives {
		for range 8 {
			c.w.Settle(ctl)
			time.Sleep(11 * time.Minute) // longer than any back-off
		}
		for _, p := range fixture.List[*corev1.Pod](c.w, fixture.Pod, "default") {
			if p.DeletionTimestamp == nil {
				continue
			}
			if p.Status.Phase == corev1.PodPending || p.Status.Phase == corev1.PodRunning {
				fixture.Change(c.w, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
			}
			none := int64(0)
			if _, _, err := c.w.Store.Delete(context.Background(), fixture.Pod, p.Namespace, p.Name, registry.DeleteOptions{GracePeriodSeconds: &none}); err != nil {
				c.w.T.Fatal(err)
			}
		}
	}
	c.w.Settle(ctl)
	return worked{job: fixture.Get[*batchv1.Job](c.w, jobKind, "default", "j").DeepCopy(), pods: c.tell(fixture.List[*corev1.Pod](c.w, fixture.Pod, "default"))}
}

// cluster of upstream's Job controller: what the API server and the node do.
type jobCluster struct {
	t      *testing.T
	client *fake.Clientset
}

var podsResource = corev1.SchemeGroupVersion.WithResource("pods")

func newJobCluster(t *testing.T, c *jobCase) *jobCluster {
	all := []runtime.Object{c.job.DeepCopy()}
	for _, p := range c.pods {
		all = append(all, p.DeepCopy())
	}
	k := &jobCluster{t: t, client: fake.NewClientset(all...)}
	k.client.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		p := a.(clienttesting.CreateAction).GetObject().(*corev1.Pod)
		p.Name = p.GenerateName + string(uuid.NewUUID())
		p.UID, p.Status.Phase, p.CreationTimestamp = uuid.NewUUID(), corev1.PodPending, metav1.Now()
		return false, nil, nil
	})
	k.client.PrependReactor("delete", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		p := k.pod(a.(clienttesting.DeleteAction).GetName())
		if p.DeletionTimestamp != nil {
			return true, nil, nil
		}
		now := metav1.Now()
		if p.DeletionTimestamp = &now; p.Spec.NodeName == "" && len(p.Finalizers) == 0 {
			return true, nil, k.client.Tracker().Delete(podsResource, p.Namespace, p.Name)
		}
		return true, nil, k.client.Tracker().Update(podsResource, p, p.Namespace)
	})
	return k
}

func (k *jobCluster) pod(name string) *corev1.Pod {
	obj, err := k.client.Tracker().Get(podsResource, "default", name)
	if err != nil {
		k.t.Fatal(err)
	}
	return obj.(*corev1.Pod).DeepCopy()
}

func (k *jobCluster) read() (*batchv1.Job, []*corev1.Pod) {
	j, err := k.client.BatchV1().Jobs("default").Get(context.Background(), "j", metav1.GetOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	list, err := k.client.CoreV1().Pods("default").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	var pods []*corev1.Pod
	for i := range list.Items {
		pods = append(pods, &list.Items[i])
	}
	return j, pods
}

// sync lets a controller that was just started handle the Job once, and
// reports whether it wrote anything.
func (k *jobCluster) sync() bool {
	j, pods := k.read()
	k.client.ClearActions()
	factory := informers.NewSharedInformerFactory(k.client, 0)
	podInformer, jobInformer := factory.Core().V1().Pods(), factory.Batch().V1().Jobs()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	jm, err := upstreamjob.NewController(ctx, k.client, podInformer, jobInformer, nil, nil)
	if err != nil {
		k.t.Fatal(err)
	}
	if err := jobInformer.Informer().GetIndexer().Add(j); err != nil {
		k.t.Fatal(err)
	}
	for _, p := range pods {
		if err := podInformer.Informer().GetIndexer().Add(p); err != nil {
			k.t.Fatal(err)
		}
	}
	if err := syncOf(jm)(ctx, "default/j"); err != nil {
		k.t.Fatal(err)
	}
	cancel()
	jm.Run(ctx, 0) // ends what New began
	for _, a := range k.client.Actions() {
		if a.GetVerb() != "get" && a.GetVerb() != "list" && a.GetResource().Resource != "events" {
			return true
		}
	}
	return false
}

// node ends the pods that are being deleted.
func (k *jobCluster) node() {
	_, pods := k.read()
	for _, p := range pods {
		if p.DeletionTimestamp == nil {
			continue
		}
		if p.Status.Phase == corev1.PodPending || p.Status.Phase == corev1.PodRunning {
			p.Status.Phase = corev1.PodFailed
			then := metav1.NewTime(time.Now().Add(-2 * time.Hour)) // every back-off is over
			p.Status.Conditions = slices.DeleteFunc(p.Status.Conditions, func(x corev1.PodCondition) bool { return x.Type == corev1.PodReady })
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse, LastTransitionTime: then})
		}
		err := k.client.Tracker().Update(podsResource, p, p.Namespace)
		if err == nil && len(p.Finalizers) == 0 {
			err = k.client.Tracker().Delete(podsResource, p.Namespace, p.Name)
		}
		if err != nil && !apierrors.IsNotFound(err) {
			k.t.Fatal(err)
		}
	}
}

func (c *jobCase) theirs(t *testing.T, turns int) (out []worked) {
	k := newJobCluster(t, c)
	for i := range turns + 1 {
		if i > 0 {
			j, _ := k.read()
			*j.Spec.Suspend = !*j.Spec.Suspend
			if err := k.client.Tracker().Update(batchv1.SchemeGroupVersion.WithResource("jobs"), j, "default"); err != nil {
				t.Fatal(err)
			}
		}
		out = append(out, k.work(c))
	}
	return out
}

func (k *jobCluster) work(c *jobCase) worked {
	for range lives {
		for range 12 {
			if !k.sync() {
				break
			}
		}
		k.node()
	}
	k.sync()
	out := worked{}
	var pods []*corev1.Pod
	out.job, pods = k.read()
	out.pods = c.tell(pods)
	return out
}

// A Job and its pods, in any state, come to the same: the same pods, the same
// counters and indexes, the same end for the same reason.
func TestJobs(t *testing.T) {
	ends, left := map[string]int{}, 0
	for seed := range uint64(cases) {
		var c *jobCase
		var all []worked
		now, turns := time.Now(), 0
		if seed%4 == 0 { // is suspended and resumed in turn
			turns = 3
		}
		synctest.Test(t, func(t *testing.T) {
			if c = newJobCase(t, seed, now); !c.doubled() {
				all = c.ours(turns)
			}
		})
		if all == nil {
			left++
			continue
		}
		for i, want := range c.theirs(t, turns) {
			got := all[i]
			a, b := fmt.Sprintln(got.pods, jobCounts(&got.job.Status), c.started(got.job)), fmt.Sprintln(want.pods, jobCounts(&want.job.Status), c.started(want.job))
			if a != b {
				t.Errorf("seed %d, turn %d: %s\n dunlin   %s upstream %s", seed, i, c, a, b)
				break
			}
			for _, x := range want.job.Status.Conditions {
				ends[string(x.Type)+" "+x.Reason]++
			}
		}
		if t.Failed() && seed > 200 {
			t.Fatal("enough")
		}
	}
	t.Logf("%d of %d Jobs left out; conditions: %v", left, cases, ends)
	for _, r := range []string{batchv1.JobReasonPodFailurePolicy, batchv1.JobReasonBackoffLimitExceeded, batchv1.JobReasonDeadlineExceeded, batchv1.JobReasonMaxFailedIndexesExceeded, batchv1.JobReasonFailedIndexes} {
		if ends["Failed "+r] < 3 {
			t.Errorf("%d Jobs ended with %s: the cases do not try it", ends["Failed "+r], r)
		}
	}
	for _, r := range []string{"JobSuspended", "JobResumed"} {
		if ends["Suspended "+r] < 50 {
			t.Errorf("%d times %s: the cases do not try it", ends["Suspended "+r], r)
		}
	}
	for _, r := range []string{batchv1.JobReasonSuccessPolicy, batchv1.JobReasonCompletionsReached} {
		if ends["Complete "+r] < 3 {
			t.Errorf("%d Jobs ended with %s: the cases do not try it", ends["Complete "+r], r)
		}
	}
}

// started says whether the Job has a time of start, and whether that is the one
// that it came with. One that ends without gets one from Dunlin at its end, as
// upstream's API server demands (but not upstream's fake client).
func (c *jobCase) started(j *batchv1.Job) string {
	switch at := j.Status.StartTime; {
	case at == nil && slices.ContainsFunc(j.Status.Conditions, func(x batchv1.JobCondition) bool {
		return (x.Type == batchv1.JobComplete || x.Type == batchv1.JobFailed) && x.Status == corev1.ConditionTrue
	}):
		return "started since"
	case at == nil:
		return "not started"
	case c.job.Status.StartTime != nil && at.Equal(c.job.Status.StartTime):
		return "started then"
	}
	return "started since"
}

func jobCounts(s *batchv1.JobStatus) string {
	broken := "none"
	if s.FailedIndexes != nil {
		broken = strconv.Quote(*s.FailedIndexes)
	}
	text := fmt.Sprintf("active %d ready %d terminating %d succeeded %d failed %d done %q broken %s", s.Active, zeroed(s.Ready), zeroed(s.Terminating), s.Succeeded, s.Failed, s.CompletedIndexes, broken)
	if u := s.UncountedTerminatedPods; u != nil && len(u.Failed)+len(u.Succeeded) > 0 {
		text += fmt.Sprintf(" uncounted %d+%d", len(u.Succeeded), len(u.Failed))
	}
	var conditions []string
	for _, c := range s.Conditions {
		if c.Reason == batchv1.JobReasonPodFailurePolicy {
			c.Message = "" // names one of the pods that a rule matches, whichever came first
		}
		conditions = append(conditions, fmt.Sprintf("%s=%s %s %s", c.Type, c.Status, c.Reason, c.Message))
	}
	slices.Sort(conditions)
	return fmt.Sprintf("%s %q", text, conditions)
}

func zeroed(n *int32) int32 {
	if n == nil {
		return 0
	}
	return *n
}
