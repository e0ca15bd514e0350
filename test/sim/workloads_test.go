package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// Workloads beside the Deployments: a StatefulSet with a budget from which
// pods are evicted, a ReplicaSet whose one pod has a stop deadline, an indexed
// Job, and a CronJob. They are of every seed.
const (
	dbName   = "db"
	jobName  = "batch"
	cronName = "tick"
	dbSize   = 3
	soloName = "solo"
)

// jobCompletions and jobTime: each index takes a while, so that faults meet it.
const (
	jobCompletions = 4
	jobTime        = 9 * time.Second
	// jobBound is for the longest back-off of a Job, twice.
	jobBound = 25 * time.Minute
)

// workloads are what the seed decides of them.
type workloads struct {
	evictions []time.Duration // between them
	jobAt     time.Duration
	claims    bool // the StatefulSet's pods have some
}

func newWorkloads(seed uint64) workloads {
	r := rand.New(rand.NewPCG(seed, 3))
	var p workloads
	for at := time.Duration(0); at < faultTime; {
		d := time.Duration(2+r.IntN(20)) * time.Second
		p.evictions = append(p.evictions, d)
		at += d
	}
	p.jobAt = time.Duration(r.IntN(60)) * time.Second
	p.claims = r.IntN(2) == 0
	return p
}

func template(app, image string, policy corev1.RestartPolicy) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}, Annotations: map[string]string{"dunlin.dev/placement": "spread"}},
		Spec: corev1.PodSpec{RestartPolicy: policy, Containers: []corev1.Container{{Name: "c", Image: image, Resources: requests()}}}}
}

func (c *client) statefulSet() *appsv1.StatefulSet {
	n := int32(dbSize)
	t := template(dbName, image(imageOK, 0), corev1.RestartPolicyAlways)
	t.Spec.Containers[0].ReadinessProbe = c.readiness()
	return &appsv1.StatefulSet{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "StatefulSet"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: dbName},
		Spec: appsv1.StatefulSetSpec{Replicas: &n, ServiceName: dbName, PodManagementPolicy: appsv1.ParallelPodManagement, Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t}}
}

// soloSet is a ReplicaSet of one pod, which stops by itself on a node that is
// cut off, and is replaced after that.
func (c *client) soloSet() *appsv1.ReplicaSet {
	one, grace := int32(1), int64(1)
	t := template(soloName, image(imageSolo, 0), corev1.RestartPolicyAlways)
	t.Annotations[manifests.AnnotationStopDeadline] = "10s"
	t.Spec.TerminationGracePeriodSeconds = &grace
	t.Spec.Containers[0].ReadinessProbe = c.readiness()
	return &appsv1.ReplicaSet{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "ReplicaSet"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: soloName},
		Spec: appsv1.ReplicaSetSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t}}
}

func dbBudget() *policyv1.PodDisruptionBudget {
	one := intstr.FromInt32(1)
	return &policyv1.PodDisruptionBudget{TypeMeta: metav1.TypeMeta{APIVersion: "policy/v1", Kind: "PodDisruptionBudget"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: dbName},
		Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": dbName}}}}
}

func jobSpec(app string) batchv1.JobSpec {
	n, two, backoff := int32(jobCompletions), int32(2), int32(1000)
	mode := batchv1.IndexedCompletion
	return batchv1.JobSpec{Completions: &n, Parallelism: &two, BackoffLimit: &backoff, CompletionMode: &mode, Template: template(app, image(imageJob, 0), corev1.RestartPolicyNever)}
}

func batchJob() *batchv1.Job {
	return &batchv1.Job{TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "Job"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: jobName}, Spec: jobSpec(jobName)}
}

func cronJob() *batchv1.CronJob {
	return &batchv1.CronJob{TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "CronJob"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: cronName},
		Spec: batchv1.CronJobSpec{Schedule: "* * * * *", ConcurrencyPolicy: batchv1.ForbidConcurrent, JobTemplate: batchv1.JobTemplateSpec{Spec: jobSpec(cronName)}}}
}

// make creates an object, until a server says that it is there.
func (c *client) make(ctx context.Context, path string, obj runtime.Object) {
	for {
		o, code, err := c.call(ctx, http.MethodPost, path, jsonType, obj, nil)
		if o == done || code == http.StatusConflict {
			return
		}
		if pause(ctx, time.Second) != nil {
			c.w.violated("%s: %v", path, err)
			return
		}
	}
}

// drop deletes an object with what it owns, until it is gone.
func (c *client) drop(ctx context.Context, path string) {
	background := metav1.DeletePropagationBackground
	for {
		_, code, err := c.call(ctx, http.MethodDelete, path, jsonType, &metav1.DeleteOptions{TypeMeta: metav1.TypeMeta{Kind: "DeleteOptions", APIVersion: "v1"}, PropagationPolicy: &background}, nil)
		if code == http.StatusNotFound {
			return
		}
		if pause(ctx, time.Second) != nil {
			c.w.violated("%s: %v", path, err)
			return
		}
	}
}

const (
	rsPath    = "/apis/apps/v1/namespaces/default/replicasets"
	setsPath  = "/apis/apps/v1/namespaces/default/statefulsets"
	jobsPath  = "/apis/batch/v1/namespaces/default/jobs"
	cronsPath = "/apis/batch/v1/namespaces/default/cronjobs"
	podsPath  = "/api/v1/namespaces/default/pods"
	pdbsPath  = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
)

// run makes the workloads and evicts until stop closes.
func (p *workloads) run(ctx context.Context, c *client, stop chan struct{}) {
	c.make(ctx, pdbsPath, dbBudget())
	set := c.statefulSet()
	if p.claims {
		withClaims(set)
	}
	c.make(ctx, setsPath, set)
	c.make(ctx, rsPath, c.soloSet())
	c.make(ctx, cronsPath, cronJob())
	var wg sync.WaitGroup
	wg.Go(func() {
		if pause(ctx, p.jobAt) == nil {
			c.make(ctx, jobsPath, batchJob())
		}
	})
	for i, d := range p.evictions {
		select {
		case <-stop:
		case <-time.After(d):
			c.evict(ctx, fmt.Sprintf("%s-%d", dbName, i%dbSize))
		}
	}
	wg.Wait()
	<-stop
}

// evictAll asks for all pods of the set at once, when nothing else takes any:
// its budget lets one go.
func (p *workloads) evictAll(ctx context.Context, c *client) {
	sleep(aftermath)
	for i := range dbSize {
		c.evict(ctx, fmt.Sprintf("%s-%d", dbName, i))
	}
}

func (c *client) evict(ctx context.Context, pod string) {
	o, _, err := c.call(ctx, http.MethodPost, podsPath+"/"+pod+"/eviction", jsonType,
		&policyv1.Eviction{TypeMeta: metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod}}, nil)
	c.w.say("%s: evicts %s: %v %v", c.name, pod, o == done, err)
}

// end waits until the Job has its completions, and takes away what would go
// on for ever.
func (p *workloads) end(ctx context.Context, c *client) {
	c.drop(ctx, cronsPath+"/"+cronName)
	for began := time.Now(); ; {
		var j batchv1.Job
		o, _, err := c.call(ctx, http.MethodGet, jobsPath+"/"+jobName, jsonType, nil, &j)
		if o == done && err == nil && isComplete(&j) {
			break
		}
		if time.Since(began) > jobBound || pause(ctx, 2*time.Second) != nil {
			c.w.violated("Job %s is not complete %s after the last fault: %+v (%v)", jobName, time.Since(began), j.Status, err)
			break
		}
	}
	c.drop(ctx, jobsPath+"/"+jobName)
}

func isComplete(j *batchv1.Job) bool {
	for _, c := range j.Status.Conditions {
		if c.Type == batchv1.JobComplete && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

// jobView is what the checker knows of a Job, in commit order.
type jobView struct {
	name      string
	succeeded int32
	complete  bool
}

// jobChanged holds a Job's new record against the one before.
func (c *checker) jobChanged(srv *controlplane.Server, ev state.Event) {
	h := &ev.Record.Header
	if ev.Type == state.Deleted {
		delete(c.jobs, h.UID)
		return
	}
	obj, err := srv.Store().Decode(ev.Record)
	j, ok := obj.(*batchv1.Job)
	if err != nil || !ok {
		c.w.violated("decode %v: %v", h.Key, err)
		return
	}
	was := c.jobs[h.UID]
	if was == nil {
		if ev.Type == state.Added {
			c.jobAdded(j)
		}
		was = &jobView{name: j.Name}
		c.jobs[h.UID] = was
	}
	switch n := j.Status.Succeeded; {
	case n < was.succeeded:
		c.w.violated("Job %s: %d completions were counted, now %d", j.Name, was.succeeded, n)
	case n > jobCompletions:
		c.w.violated("Job %s: %d completions of %d: one counts twice", j.Name, n, jobCompletions)
	}
	done := isComplete(j)
	if was.complete && !done {
		c.w.violated("Job %s was complete and is not any more", j.Name)
	}
	if done && j.Status.Succeeded != jobCompletions {
		c.w.violated("Job %s is complete with %d of %d completions", j.Name, j.Status.Succeeded, jobCompletions)
	}
	was.succeeded, was.complete = j.Status.Succeeded, done
}

// jobAdded holds the Jobs of the CronJob to their rules: one for each time,
// ever, and one at a time.
func (c *checker) jobAdded(j *batchv1.Job) {
	if !strings.HasPrefix(j.Name, cronName+"-") {
		return
	}
	if c.ticks[j.Name] {
		c.w.violated("CronJob %s started %s twice", cronName, j.Name)
	}
	c.ticks[j.Name] = true
	for _, o := range c.jobs {
		if strings.HasPrefix(o.name, cronName+"-") && !o.complete {
			c.w.violated("CronJob %s started %s while %s runs, which it forbids", cronName, j.Name, o.name)
		}
	}
}

// jobPod: no Job makes a pod once it is complete.
func (c *checker) jobPod(p *podView) {
	if j := c.jobs[p.set]; j != nil && j.complete {
		c.w.violated("Job %s is complete and makes pod %s", j.name, p.name)
	}
}

// evicted: an eviction leaves as many ready pods as the budget asks for.
func (c *checker) evicted(p *podView) {
	if p.app != dbName || !c.quiet() || c.restFrom.IsZero() {
		return
	}
	if n := c.count(dbName, true); n < dbSize-1 {
		c.w.violated("the eviction of %s leaves %d ready pods of %s, its budget asks for %d: %s", p.name, n, dbName, dbSize-1, c.describe(dbName))
	}
}

// only is which process has the name of a StatefulSet's pod, and which is that
// of the ReplicaSet with a stop deadline, of all machines: there is never more
// than one.
type only struct {
	mu   sync.Mutex
	runs map[string]string // by place: "uid on machine"
}

// place is what one pod at a time may have; "" is none.
func place(pod string) string {
	switch {
	case strings.HasPrefix(pod, dbName+"-"):
		return pod
	case strings.HasPrefix(pod, soloName+"-"):
		return soloName
	}
	return ""
}

func (o *only) begin(w *world, name, uid, machine string) {
	if name = place(name); name == "" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	me := uid + " on " + machine
	if other := o.runs[name]; other != "" && other != me {
		w.violated("two pods %s run at once: %s and %s", name, other, me)
	}
	o.runs[name] = me
}

func (o *only) end(name, uid, machine string) {
	name = place(name)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.runs[name] == uid+" on "+machine {
		delete(o.runs, name)
	}
}

// awaitsEviction says that a budget still counts a pod as evicted.
func awaitsEviction(srv *controlplane.Server) bool {
	r, ok := srv.Consensus().State().Snapshot().Get(state.Key{Kind: "PodDisruptionBudget.policy", Namespace: "default", Name: dbName})
	if !ok {
		return false
	}
	obj, err := srv.Store().Decode(r)
	b, ok := obj.(*policyv1.PodDisruptionBudget)
	return err == nil && ok && len(b.Status.DisruptedPods) > 0
}
