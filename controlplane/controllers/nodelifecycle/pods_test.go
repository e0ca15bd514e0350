package nodelifecycle

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/manifests"
)

// A pod that stops by itself after an hour without contact is waited for that
// long, its grace and a margin; a StatefulSet's name is free then.
func TestStopDeadline(t *testing.T) {
	taints := []corev1.Taint{{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}}
	at := func(d time.Duration) func(*corev1.Taint) time.Duration {
		return func(*corev1.Taint) time.Duration { return d }
	}
	zero, grace := int64(0), int64(10)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{manifests.AnnotationStopDeadline: "1h"}},
		Spec: corev1.PodSpec{TerminationGracePeriodSeconds: &grace,
			Tolerations: []corev1.Toleration{{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &zero}}}}
	silent := verdict{silent: true, evict: true}
	const stops = time.Hour + 36*time.Second + 10*time.Second + 5*time.Second
	bare := pod.DeepCopy()
	bare.Annotations = nil
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		owner string
		after time.Duration
		want  fate
		again time.Duration
	}{
		"set, before":         {pod, statefulSet, stops - time.Second, unready, time.Second},
		"set, after":          {pod, statefulSet, stops, free, never},
		"set, no deadline":    {bare, statefulSet, 1000 * time.Hour, unready, never},
		"replicas, before":    {pod, "ReplicaSet.apps", stops - time.Second, unready, time.Second},
		"replicas, after":     {pod, "ReplicaSet.apps", stops, lose, never},
		"replicas, without":   {bare, "ReplicaSet.apps", 0, lose, never},
		"daemon, for ever":    {pod, "DaemonSet.apps", 1000 * time.Hour, unready, never},
		"job, five minutes":   {bare, "Job.batch", 4 * time.Minute, unready, time.Minute},
		"job, then it counts": {bare, "Job.batch", 5 * time.Minute, lose, never},
	} {
		got, again := podFate(c.pod, taints, silent, c.owner, at(c.after), at(c.after))
		if got != c.want || again != c.again {
			t.Errorf("%s: fate %d again %v, want %d again %v", name, got, again, c.want, c.again)
		}
	}
	with := func(p *corev1.Pod, after string) *corev1.Pod {
		p = p.DeepCopy()
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		p.Annotations[manifests.AnnotationReplaceAfter] = after
		return p
	}
	for name, c := range map[string]struct {
		pod            *corev1.Pod
		owner          string
		after, witness time.Duration
		want           fate
		again          time.Duration
	}{
		"replicas, never":           {with(bare, "never"), "ReplicaSet.apps", 1000 * time.Hour, 1000 * time.Hour, unready, never},
		"replicas, later":           {with(bare, "10m"), "ReplicaSet.apps", 9 * time.Minute, 0, unready, time.Minute},
		"replicas, now":             {with(bare, "10m"), "ReplicaSet.apps", 10 * time.Minute, 0, lose, never},
		"job, at once":              {with(bare, "0s"), "Job.batch", 0, 0, lose, never},
		"daemon, whatever it says":  {with(bare, "0s"), "DaemonSet.apps", 1000 * time.Hour, 1000 * time.Hour, unready, never},
		"set, whatever it says":     {with(bare, "0s"), statefulSet, 1000 * time.Hour, 1000 * time.Hour, unready, never},
		"set, an old leader's word": {pod, statefulSet, 1000 * time.Hour, stops - time.Second, unready, time.Second},
		"replicas, likewise":        {pod, "ReplicaSet.apps", 1000 * time.Hour, stops - time.Second, unready, time.Second},
		"replicas, later than that": {with(pod, "2h"), "ReplicaSet.apps", 2*time.Hour - time.Second, 2 * time.Hour, unready, time.Second},
	} {
		got, again := podFate(c.pod, taints, silent, c.owner, at(c.after), at(c.witness))
		if got != c.want || again != c.again {
			t.Errorf("%s: fate %d again %v, want %d again %v", name, got, again, c.want, c.again)
		}
	}
	marked := pod.DeepCopy()
	marked.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: lost.Reason}}
	ends, endless := marked.DeepCopy(), marked.DeepCopy()
	ends.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	delete(endless.Annotations, manifests.AnnotationStopDeadline)
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		owner string
		want  fate
	}{
		"replaced after its deadline":   {marked, "ReplicaSet.apps", retire},
		"a Job's":                       {marked, "Job.batch", found},
		"on its way out already":        {ends, "ReplicaSet.apps", found},
		"it ran on":                     {endless, "ReplicaSet.apps", found},
		"its node was silent for short": {pod, "ReplicaSet.apps", found},
	} {
		if got, _ := podFate(c.pod, nil, verdict{}, c.owner, at(0), at(0)); got != c.want || !needed(marked, got) {
			t.Errorf("back, %s: fate %d, want %d", name, got, c.want)
		}
	}
	if got, _ := podFate(pod, taints, verdict{silent: true, frozen: true}, statefulSet, at(2*stops), at(2*stops)); got != stay {
		t.Errorf("in a frozen zone: %d", got)
	}
}
