// Package eviction deletes pods as disruption budgets allow: what stands
// behind the eviction sub-resource of pods. It owns no goroutine and no state.
package eviction

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

var (
	budgetGK = schema.GroupKind{Group: policyv1.GroupName, Kind: "PodDisruptionBudget"}
	podGK    = schema.GroupKind{Kind: "Pod"}
)

// maxDisrupted evictions of one budget may wait for the controller to see
// them.
const maxDisrupted = 2000

// Evict deletes a pod unless that would violate its disruption budget.
// o.ResourceVersion, if the caller set one, is honoured.
func Evict(ctx context.Context, store registry.Store, namespace, name string, o registry.DeleteOptions, now func() time.Time) error {
	for range 8 { // lost races with the pod's own status
		obj, err := store.Get(podGK, namespace, name)
		if err != nil {
			return err
		}
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return apierrors.NewInternalError(fmt.Errorf("not a pod: %T", obj))
		}
		d := o
		budget, guarded, err := allowEviction(ctx, store, pod, o, now)
		if err != nil {
			return err
		}
		if !guarded && o.ResourceVersion == nil && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed && pod.DeletionTimestamp == nil {
			// It may have become healthy meanwhile, and then counts.
			d.ResourceVersion = &pod.ResourceVersion
		}
		if !o.DryRun && pod.DeletionTimestamp == nil {
			marked, err := markEvicted(ctx, store, pod, d.ResourceVersion, o.Term, now())
			if errors.Is(err, errPodMoved) {
				if o.ResourceVersion != nil {
					return apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, name, err)
				}
				continue
			}
			if err != nil {
				return err
			}
			if d.ResourceVersion != nil {
				d.ResourceVersion = &marked
			}
		}
		_, _, err = store.Delete(ctx, podGK, namespace, name, d)
		if apierrors.IsConflict(err) && o.ResourceVersion == nil && o.UID == nil {
			if budget != "" {
				return tooMany("The disruption budget "+budget+" is still being processed by the server.", 10)
			}
			continue
		}
		return err
	}
	return apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, name, errPodMoved)
}

var errPodMoved = errors.New("the pod changed meanwhile; try again")

// markEvicted says on the pod why it goes.
func markEvicted(ctx context.Context, store registry.Store, pod *corev1.Pod, rv *string, term uint64, now time.Time) (resourceVersion string, err error) {
	obj, err := store.Update(ctx, podGK, pod.Namespace, pod.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		p, ok := cur.(*corev1.Pod)
		if !ok || p.UID != pod.UID || (rv != nil && p.ResourceVersion != *rv) {
			return nil, errPodMoved
		}
		lost.SetCondition(&p.Status, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason: "EvictionByEvictionAPI", Message: "Eviction API: evicting"}, now)
		return p, nil
	}, registry.WriteOptions{Term: term})
	if err != nil {
		return "", err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return "", apierrors.NewInternalError(err)
	}
	return m.GetResourceVersion(), nil
}

// allowEviction takes one disruption from the pod's budget, if it has one and
// is guarded by it; a 429 if none is left. guarded says that one was taken,
// or that there is no budget.
func allowEviction(ctx context.Context, store registry.Store, pod *corev1.Pod, o registry.DeleteOptions, now func() time.Time) (budget string, guarded bool, err error) {
	switch {
	case pod.DeletionTimestamp != nil, pod.Status.Phase == corev1.PodSucceeded, pod.Status.Phase == corev1.PodFailed, pod.Status.Phase == corev1.PodPending:
		return "", false, nil // nothing serves that could be disrupted
	}
	all, err := budgetsOf(store, pod)
	if err != nil || len(all) == 0 {
		return "", true, err
	}
	if len(all) > 1 {
		return "", false, tooManyBudgets(all)
	}
	b := all[0]
	if !podReady(pod) {
		if p := b.Spec.UnhealthyPodEvictionPolicy; p != nil && *p == policyv1.AlwaysAllow {
			return b.Name, false, nil
		}
		if b.Status.CurrentHealthy >= b.Status.DesiredHealthy && b.Status.DesiredHealthy > 0 {
			return b.Name, false, nil
		}
	}
	if o.DryRun {
		return b.Name, true, checkBudget(b)
	}
	_, err = store.Update(ctx, budgetGK, b.Namespace, b.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		x, ok := cur.(*policyv1.PodDisruptionBudget)
		if !ok {
			return nil, apierrors.NewInternalError(fmt.Errorf("not a budget: %T", cur))
		}
		if err := checkBudget(x); err != nil {
			return nil, err
		}
		if x.Status.DisruptionsAllowed--; x.Status.DisruptionsAllowed == 0 {
			SetCondition(&x.Status, x.Generation, now())
		}
		if x.Status.DisruptedPods == nil {
			x.Status.DisruptedPods = map[string]metav1.Time{}
		}
		x.Status.DisruptedPods[pod.Name] = metav1.NewTime(now()).Rfc3339Copy()
		return x, nil
	}, registry.WriteOptions{})
	return b.Name, true, err
}

// tooManyBudgets is upstream's refusal, and names the budgets in a cause.
func tooManyBudgets(all []*policyv1.PodDisruptionBudget) error {
	names := make([]string, 0, len(all))
	for _, b := range all {
		names = append(names, b.Name)
	}
	slices.Sort(names)
	err := apierrors.NewInternalError(errors.New("This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."))
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause,
		Message: "More than one disruption budget selects the pod (" + strings.Join(names, ", ") + "), and then nothing can evict it: let one of them select other pods, or delete it"})
	return err
}

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
}

func budgetsOf(store registry.Store, pod *corev1.Pod) (out []*policyv1.PodDisruptionBudget, err error) {
	if len(pod.Labels) == 0 {
		return nil, nil
	}
	list, err := store.List(budgetGK, pod.Namespace, labels.Everything(), nil)
	if err != nil {
		return nil, err
	}
	for _, obj := range list {
		b, ok := obj.(*policyv1.PodDisruptionBudget)
		if !ok {
			continue
		}
		if s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && s.Matches(labels.Set(pod.Labels)) {
			out = append(out, b)
		}
	}
	return out, nil
}

// checkBudget returns upstream's refusal if the budget allows no disruption.
func checkBudget(b *policyv1.PodDisruptionBudget) error {
	s := &b.Status
	switch {
	case s.ObservedGeneration < b.Generation:
		return tooMany("The disruption budget "+b.Name+" is still being processed by the server.", 10)
	case len(s.DisruptedPods) > maxDisrupted:
		err := apierrors.NewForbidden(schema.GroupResource{Group: policyv1.GroupName, Resource: "poddisruptionbudget"}, b.Name,
			errors.New("DisruptedPods map too big - too many evictions not confirmed by PDB controller"))
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause,
			Message: "The disruption budget " + b.Name + " does not allow evicting pods currently: too many pending evictions not confirmed by PDB controller"})
		return err
	case s.DisruptionsAllowed > 0:
		return nil
	}
	c := meta.FindStatusCondition(s.Conditions, policyv1.DisruptionAllowedCondition)
	failed := c != nil && c.Status == metav1.ConditionFalse && c.Message != ""
	message := fmt.Sprintf("The disruption budget %s does not allow evicting pods currently", b.Name)
	switch {
	case failed && c.Reason == policyv1.SyncFailedReason:
		message += " because it failed sync: " + c.Message
	case s.CurrentHealthy <= s.DesiredHealthy:
		message = fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently", b.Name, s.DesiredHealthy, s.CurrentHealthy)
	case len(s.DisruptedPods) > 0: // evicted a moment ago, and still counted as healthy
		message = fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently, %d of which are being evicted",
			b.Name, s.DesiredHealthy, s.CurrentHealthy, len(s.DisruptedPods))
	case failed:
		message += fmt.Sprintf(" (%s): %s", c.Reason, c.Message)
	}
	return tooMany(message, 0)
}

func tooMany(message string, retry int) error {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", retry)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: message})
	return err
}

// SetCondition makes the condition DisruptionAllowed of a budget say what
// disruptionsAllowed says.
func SetCondition(st *policyv1.PodDisruptionBudgetStatus, generation int64, now time.Time) {
	c := metav1.Condition{Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionTrue, Reason: policyv1.SufficientPodsReason,
		ObservedGeneration: generation, LastTransitionTime: metav1.NewTime(now).Rfc3339Copy()}
	if st.DisruptionsAllowed <= 0 {
		c.Status, c.Reason = metav1.ConditionFalse, policyv1.InsufficientPodsReason
	}
	meta.SetStatusCondition(&st.Conditions, c)
}
